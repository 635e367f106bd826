"""Which steps have outputs, and who gets a group."""

import pytest

from nodes.steps.schedule import StepSchedule, is_for_coordinator_only, worker_of_step
from wsc.v1 import node_pb2, plan_pb2


@pytest.mark.parametrize(("num_steps", "every"), [(10, 1), (10, 3), (10, 5), (3, 100), (1, 1), (0, 2)])
def test_outputs_leave_as_often_as_they_are_counted(num_steps: int, every: int) -> None:
    schedule = StepSchedule.from_start(node_pb2.Start(num_steps=num_steps, activation_steps=every))
    leaving = [step for step in range(1, num_steps + 1) if schedule.outputs_leave(step)]
    assert len(leaving) == schedule.num_output_steps
    assert not leaving or leaving[-1] == num_steps


def test_workers_take_turns() -> None:
    assert [worker_of_step(step, 3) for step in range(1, 6)] == [0, 1, 2, 0, 1]


def test_coordinator_only() -> None:
    kind = plan_pb2.GROUP_KIND_REDUCTION
    assert is_for_coordinator_only(plan_pb2.Group(kind=kind, to_coordinator=True))
    assert not is_for_coordinator_only(plan_pb2.Group(kind=kind, to_coordinator=True, shards=[0]))
    assert not is_for_coordinator_only(plan_pb2.Group(kind=kind, to_coordinator=True, to_wafers=True))
    assert is_for_coordinator_only(plan_pb2.Group(kind=plan_pb2.GROUP_KIND_OUTPUT))
