"""The vendor's own client, where somebody has made its environment: `make vendor-test`."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # for cluster_rig

PYTHON = os.environ.get("WAFERBOX_VENDOR_PYTHON", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if not PYTHON and item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skip(reason="no environment of the vendor's client: `make vendor-test`"))
