"""The steps that the tests of the compiler trace are for some of these tests too."""

import sys
from pathlib import Path

import pytest
from probe import PROBE

from benchmarks.process_hooks import hook_variables

sys.path.append(str(Path(__file__).parents[1] / "appliance"))


@pytest.fixture
def probe_variables(tmp_path: Path) -> dict[str, str]:
    """The environment in which the processes of a cluster find the probe as the module `swarmx`."""
    package = tmp_path / "swarmx"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROBE)
    hook = tmp_path / "hook.py"
    hook.write_text(f"import sys\n\n\ndef install(module):\n    sys.path.insert(0, {str(tmp_path)!r})\n")
    return hook_variables(hook)
