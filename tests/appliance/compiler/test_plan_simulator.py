"""The simulator's own checks: what is wrong in a plan is noticed."""

from typing import Any

import pytest
import torch
from compiled_steps import Step, Traced
from plan_simulator import Simulation
from simulated_links import Deadlock, Hazard
from wide_steps import Wide, rows, trained

from wsc.v1 import plan_pb2

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def step_plan() -> tuple[Traced, plan_pb2.Plan]:
    def build(model: Any) -> Step:
        return lambda x: trained(model, model(x).pow(2).mean())

    traced = Traced(build, Wide(2, state=False), rows()[0])
    return traced, traced.plan(2)


def test_the_plan_is_the_same_every_time() -> None:
    traced, plan = step_plan()
    assert traced.plan(2).SerializeToString(deterministic=True) == plan.SerializeToString(deterministic=True)


def test_the_simulator_sees_a_deadlock() -> None:
    traced, plan = step_plan()
    instructions = list(plan.wafer.instructions)
    first = next(i for i, item in enumerate(instructions) if item.WhichOneof("kind") == "send")
    del plan.wafer.instructions[first]
    with pytest.raises(Deadlock):
        Simulation(plan, traced.initial).run([[batch] for batch in rows()])


def test_the_simulator_sees_a_write_that_comes_too_early() -> None:
    """A weight is overwritten before the wafers have read it."""
    traced, plan = step_plan()
    shard = plan.memoryx[0]
    weight, other = (
        next(slot for slot in shard.states if slot.name == f"state.model.layers.{i}.weight") for i in (1, 0)
    )
    sends = [i for i, item in enumerate(shard.instructions) if item.WhichOneof("kind") == "send"]
    early = plan_pb2.Instruction(commit=plan_pb2.Commit(value=other.value, state=weight.value))
    instructions = list(shard.instructions)
    instructions.insert(sends[0] + 1, early)
    del shard.instructions[:]
    shard.instructions.extend(instructions)
    with pytest.raises(Hazard):
        Simulation(plan, traced.initial).run([[batch] for batch in rows()], seed=1)
