"""The steps that the tests of the compiler trace are for some of these tests too."""

import sys
from pathlib import Path

import pytest
from probe import PROBE

sys.path.append(str(Path(__file__).parents[1] / "appliance"))


@pytest.fixture
def probe_folder(tmp_path: Path) -> Path:
    """A folder in which the module `swarmx` is the probe."""
    package = tmp_path / "swarmx"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROBE)
    return tmp_path
