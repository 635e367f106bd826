"""Fixtures of the tests of the runtime. Some use the traced steps of the compiler's tests, so their folder is added."""

import sys
from pathlib import Path

import pytest
from probe import PROBE

from benchmarks.process_hooks import hook_variables

sys.path.append(str(Path(__file__).parents[2] / "appliance"))


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each SwarmX process of the test run the probe instead."""
    package = tmp_path / "probe" / "swarmx"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROBE)
    hook = tmp_path / "hook.py"
    hook.write_text(f"import sys\n\ndef install(module):\n    sys.path.insert(0, {str(package.parent)!r})\n")
    for name, value in hook_variables(hook).items():
        monkeypatch.setenv(name, value)
