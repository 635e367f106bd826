"""Every import name leads to the same code, and whoever else provides one is named."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from forked_checks import Outcome, run

pytestmark = pytest.mark.cluster

CHECKS = {
    "a submodule under a function's name": """
from cerebras.pytorch.backend import Backend
import cerebras.pytorch.backend, cerebras_pytorch.backend, cerebras_pytorch.experimental.backend
import cerebras.pytorch as new, cerebras_pytorch as old, cerebras_pytorch.experimental as older
import cstorch
assert Backend is cstorch.backend.__globals__["Backend"]
for function in (new.backend, new.compile, old.backend, older.backend, older.trace, older.compile):
    assert type(function).__name__ == "function", function
""",
    "what an older generation does not define is cstorch's own": """
from cerebras_pytorch.optim.lr_scheduler import LinearLR
from cerebras_pytorch.experimental.utils.tracker import RateTracker
from cerebras.framework.torch.optim import SGD
import cerebras_pytorch, cerebras.framework.torch, cerebras_torch
import cstorch.optim.lr_scheduler, cstorch.utils.tracker
assert LinearLR is cstorch.optim.lr_scheduler.LinearLR
assert RateTracker is cstorch.utils.tracker.RateTracker
assert cerebras_pytorch.save is cstorch.save
assert cerebras_pytorch.current_backend is cstorch.current_backend
assert cerebras.framework.torch is cerebras_torch
assert SGD is cerebras_torch.optim.SGD is cstorch.optim.SGD
""",
    "where a module differs, its own is imported": """
from cerebras_pytorch.utils.data import DataExecutor, DataLoader
from cerebras_pytorch.experimental.utils.data import DataLoader as OldLoader
import cstorch.utils.data
assert DataExecutor is not cstorch.utils.data.DataExecutor
assert DataLoader is cstorch.utils.data.DataLoader is not OldLoader
""",
    "modules that have another place here": """
from cerebras.pytorch.utils.data.utils import infer_batch_size
from cerebras_pytorch.utils.data.data_executor import DataExecutor
from cerebras.pytorch.utils.data.data_executor import DataExecutor as New
from cerebras.pytorch.utils.step_closures import step_closure
import cstorch
assert step_closure is cstorch.step_closure
assert New is cstorch.utils.data.DataExecutor is not DataExecutor
""",
    "helpers of the appliance": """
from cerebras.appliance.CSConfig import CSConfig
from cerebras.appliance.log import ClassLogger, named_class_logger
from cerebras_appliance.errors import ApplianceUnknownError
import cerebras_appliance, cerebras_pytorch, cstorch.errors
assert CSConfig is cerebras_pytorch.utils.CSConfig
assert issubclass(cstorch.errors.ClusterError, ApplianceUnknownError)
class Mine(ClassLogger): pass
@named_class_logger("train")
class Named(ClassLogger): pass
from cerebras.appliance.errors import ApplianceNanError
from cerebras.appliance.utils.classes import retrieve_all_subclasses
class Base: pass
class Left(Base): pass
class Right(Base): pass
class Both(Left, Right): pass
assert list(retrieve_all_subclasses(Base)) == [Left, Right, Both]
assert not issubclass(ApplianceNanError, ApplianceUnknownError)
for statement in (
    "from cerebras.appliance.pb.common import x",
    "from cerebras.appliance.errors import ApplianceStallError",
    "from cerebras_appliance import saver",
):
    try:
        exec(statement)
    except ImportError as error:
        assert "scripts find CSConfig" in str(error), error
    else:
        raise AssertionError(statement)
assert Mine().logger.name == "cerebras.__main__.Mine"
assert Named().logger.name == Named.logger.name == "cerebras.train"
""",
}


def run_beside(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(path), *([inherited] if inherited else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, Outcome]:
    return run(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_names(check: str, outcomes: Mapping[str, Outcome]) -> None:
    assert outcomes[check].status == 0, outcomes[check].stderr
    assert outcomes[check].stderr == ""


def test_another_distribution_that_comes_first_is_named_the_winner(tmp_path: Path) -> None:
    (tmp_path / "cerebras_pytorch").mkdir()
    (tmp_path / "cerebras_pytorch" / "__init__.py").write_text("name = 'foreign'\n")
    done = run_beside("import cstorch, cerebras_pytorch; print(cerebras_pytorch.name)", tmp_path)
    assert done.stdout == "foreign\n"
    assert f"{tmp_path / 'cerebras_pytorch'} is imported" in done.stderr
    assert "the import name cerebras_pytorch" in done.stderr


def test_a_namespace_beside_ours_loses_what_both_have_and_keeps_the_rest(tmp_path: Path) -> None:
    for package in ("pytorch", "cloud"):
        (tmp_path / "cerebras" / package).mkdir(parents=True)
        (tmp_path / "cerebras" / package / "__init__.py").write_text("name = 'foreign'\n")
    done = run_beside(
        "import cerebras.pytorch, cerebras.cloud; print(cerebras.pytorch.__name__, cerebras.cloud.name)", tmp_path
    )
    assert done.stdout == "cstorch foreign\n", done.stderr
    assert f"{tmp_path / 'cerebras' / 'pytorch'} is not" in done.stderr
    assert "the import name cerebras.pytorch" in done.stderr
