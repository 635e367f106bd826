"""The steps that the tests of the compiler trace are for some of these tests too."""

import sys
from pathlib import Path

import pytest
from probe import PROBE

from benchmarks.process_hooks import hook_variables

sys.path.append(str(Path(__file__).parents[2] / "appliance"))


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of SwarmX that the test starts runs the probe instead."""
    package = tmp_path / "probe" / "swarmx"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROBE)
    hook = tmp_path / "hook.py"
    hook.write_text(f"import sys\n\ndef install(module):\n    sys.path.insert(0, {str(package.parent)!r})\n")
    for name, value in hook_variables(hook).items():
        monkeypatch.setenv(name, value)
