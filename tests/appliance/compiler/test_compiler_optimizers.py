"""Every optimizer on a simulated cluster; which updates become generated loops."""

from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Getters, Step, Traced
from optimizer_cases import BASIC, Case
from torch import nn
from torch.nn import functional as F

from cstorch._internal.state import Registry, named_getters
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.lair.lower import lower
from wsc.v1 import plan_pb2

pytestmark = pytest.mark.parity

# Means of rows, columns and all; norms; products of matrices: these lie between several loops.
NEED_WHOLE_TENSORS = ("Adafactor", "Lamb", "Muon")


def build(case: Case) -> Any:
    def built(model: Any) -> tuple[Step, Getters]:
        registry = Registry()
        optimizer = case.ours(model.parameters())
        registry.register("optimizer", optimizer)

        def step(batch: Any) -> torch.Tensor:
            features, labels = batch
            loss = F.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return step, dict(named_getters(registry))

    return built


def network(case: Case) -> nn.Module:
    bias = not case.only_matrices
    return nn.Sequential(nn.Linear(7, 6, bias=bias), nn.Tanh(), nn.Linear(6, 4, bias=bias))


@pytest.mark.parametrize("case", BASIC, ids=str)
def test_two_wafers_and_two_shards_give_what_plain_torch_gives(case: Case) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(BATCH, 7, dtype=torch.float64), torch.randint(4, (BATCH,))) for _ in range(3)]
    traced = Traced(build(case), network(case), batches[0])
    traced.check(batches, [(2, 2)], rtol=1e-9)


@pytest.mark.parametrize("case", BASIC, ids=str)
def test_all_that_updates_a_tensor_is_a_generated_loop(case: Case) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(BATCH, 7), torch.randint(4, (BATCH,)))
    plan = Traced(build(case), network(case), batch, double=False).plan(2, 2)
    tensors, loops = 0, 0
    for part in plan.memoryx:
        found, runs = committing_runs(part)
        tensors += found
        loops += len(runs)
        for module in map(parse_module, runs):
            verify(module)
            lower(module)
    weights = 2 if case.only_matrices else 4
    if case.name.startswith(NEED_WHOLE_TENSORS):
        assert weights < loops <= tensors
    else:
        assert loops == weights  # one for each weight, with all its state


def committing_runs(part: plan_pb2.MemoryXPlan) -> tuple[int, list[str]]:
    """How many states with a dimension there are, and the kernels that write to one."""
    states = {state.value for state in part.states if state.type.shape}
    texts = {kernel.id: kernel.cirh for kernel in part.kernels}
    runs = [instruction.run for instruction in part.instructions if instruction.WhichOneof("kind") == "run"]
    return len(states), [texts[run.kernel] for run in runs if states.intersection(run.commits)]
