"""Makes the rigs of the integration tests importable."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))


@pytest.fixture(autouse=True)
def never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process do not say that they are slow, however busy the machine is."""
    monkeypatch.setattr("waferbox.output.working.INTERVALS", (3600.0,))
