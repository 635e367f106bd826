"""cerebras.pytorch is cstorch, in whatever order things are imported."""

from collections.abc import Mapping

import pytest
from forked_checks import Outcome, run

pytestmark = pytest.mark.cluster

CHECKS = {
    "alias first": """
import cerebras.pytorch as a
import cstorch as b
assert a is b
""",
    "submodule of the alias first": """
from cerebras.pytorch.optim.lr_scheduler import LinearLR
import cstorch.optim.lr_scheduler
assert LinearLR is cstorch.optim.lr_scheduler.LinearLR
assert LinearLR.__module__ == "cstorch.optim.lr_scheduler"
""",
    "submodule of the real one first": """
import cstorch.optim.sgd as real
import cerebras.pytorch.optim.sgd as alias
import cerebras.pytorch.metrics
import cstorch.metrics
assert real is alias
assert cerebras.pytorch.metrics is cstorch.metrics
assert real.__name__ == real.__spec__.name == "cstorch.optim.sgd"
""",
    "attribute access after a plain import": """
import cerebras.pytorch.utils.tracker
import cerebras
import cstorch
assert cerebras.pytorch is cstorch
assert cerebras.pytorch.utils.tracker.RateTracker is cstorch.utils.tracker.RateTracker
""",
    "no such submodule": """
import cerebras.pytorch
try:
    import cerebras.pytorch.no_such_thing
except ModuleNotFoundError as error:
    assert error.name == "cerebras.pytorch.no_such_thing", error
else:
    raise AssertionError
""",
}


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, Outcome]:
    return run(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_alias(check: str, outcomes: Mapping[str, Outcome]) -> None:
    assert outcomes[check].status == 0, outcomes[check].stderr
