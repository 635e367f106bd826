"""Which steps have outputs, and who gets a group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waferbox.runtime.schedule import (
    MAX_CHECKPOINTS,
    MAX_GROUPS,
    MAX_STEPS,
    StepSchedule,
    check_groups,
    is_for_coordinator_only,
    steps_of_worker,
    worker_of_step,
)
from wsc.v1 import node_pb2, plan_pb2


@pytest.mark.parametrize(("num_steps", "every"), [(10, 1), (10, 3), (10, 5), (3, 100), (1, 1), (0, 2)])
def test_outputs_leave_as_often_as_they_are_counted(num_steps: int, every: int) -> None:
    schedule = StepSchedule.from_start(node_pb2.Start(num_steps=num_steps, activation_steps=every))
    leaving = [step for step in range(1, num_steps + 1) if schedule.outputs_leave(step)]
    assert len(leaving) == schedule.num_output_steps
    assert not leaving or leaving[-1] == num_steps
    assert list(schedule.output_steps()) == leaving


def test_workers_take_turns() -> None:
    assert [worker_of_step(step, 3) for step in range(1, 6)] == [0, 1, 2, 0, 1]


def test_a_worker_counts_its_steps_without_a_list_of_them() -> None:
    assert list(steps_of_worker(1, 3, 10)) == [2, 5, 8]
    assert len(steps_of_worker(0, 1, MAX_STEPS)) == MAX_STEPS


def test_the_client_gets_outputs_and_checkpoints_in_order() -> None:
    start = node_pb2.Start(num_steps=10, activation_steps=4, checkpoint_steps=[0, 3, 8, 9, 11])
    schedule = StepSchedule.from_start(start)
    assert list(schedule.steps_for_client(has_outputs=True)) == [3, 4, 8, 9, 10]
    assert list(schedule.steps_for_client(has_outputs=False)) == [3, 8, 9]
    far = StepSchedule.from_start(node_pb2.Start(num_steps=MAX_STEPS, activation_steps=MAX_STEPS))
    assert list(far.steps_for_client(has_outputs=True)) == [MAX_STEPS]


def told(schedule: StepSchedule) -> dict[str, list[int]]:
    """The steps of the execution in which something happens."""
    steps = range(1, schedule.num_steps + 1)
    return {
        "outputs": [schedule.global_step(step) for step in steps if schedule.outputs_leave(step)],
        "output steps": [schedule.global_step(step) for step in schedule.output_steps()],
        "snapshots": [schedule.global_step(step) for step in steps if schedule.keeps_snapshot(step)],
        "for the client": [schedule.global_step(step) for step in schedule.steps_for_client(has_outputs=True)],
        "checkpoints": [schedule.global_step(step) for step in schedule.steps_for_client(has_outputs=False)],
    }


@given(st.data())
def test_an_execution_in_two_epochs_tells_what_it_tells_in_one(data: st.DataObject) -> None:
    num_steps = data.draw(st.integers(0, 40))
    done_steps = data.draw(st.integers(0, num_steps))
    start = node_pb2.Start(
        num_steps=num_steps,
        activation_steps=data.draw(st.integers(0, 50)),
        checkpoint_steps=data.draw(st.lists(st.integers(0, 45), max_size=8)),
    )
    whole = told(StepSchedule.from_start(start))
    start.done_steps = done_steps
    rest = StepSchedule.from_start(start)
    assert rest.num_steps == num_steps - done_steps
    assert rest.checkpoint_steps == set(whole["snapshots"]) & set(range(done_steps + 1, num_steps + 1))
    assert rest.num_output_steps == len(list(rest.output_steps()))
    assert told(rest) == {what: [step for step in steps if step > done_steps] for what, steps in whole.items()}


def test_more_steps_than_there_are_cannot_have_been_done() -> None:
    assert StepSchedule.from_start(node_pb2.Start(num_steps=3, done_steps=3)).num_steps == 0
    with pytest.raises(ValueError, match="4 of 3 steps cannot have been done"):
        StepSchedule.from_start(node_pb2.Start(num_steps=3, done_steps=4))


@pytest.mark.parametrize(
    "start",
    [
        node_pb2.Start(num_steps=1 << 63),
        node_pb2.Start(num_steps=1, activation_steps=1 << 63),
        node_pb2.Start(num_steps=1, run_ahead_steps=1 << 31),
        node_pb2.Start(num_steps=1, checkpoint_steps=range(MAX_CHECKPOINTS + 1)),
    ],
    ids=["steps", "activation steps", "run-ahead steps", "checkpoints"],
)
def test_numbers_that_cannot_be_meant_are_refused(start: node_pb2.Start) -> None:
    with pytest.raises(ValueError, match="at most"):
        StepSchedule.from_start(start)


def test_groups_that_no_plan_has_are_refused() -> None:
    check_groups([plan_pb2.Group(id=1)])
    with pytest.raises(ValueError, match="number of a group"):
        check_groups([plan_pb2.Group(id=1 << 31)])
    with pytest.raises(ValueError, match="at most"):
        check_groups([plan_pb2.Group()] * (MAX_GROUPS + 1))


def test_coordinator_only() -> None:
    kind = plan_pb2.GROUP_KIND_REDUCTION
    assert is_for_coordinator_only(plan_pb2.Group(kind=kind, to_coordinator=True))
    assert not is_for_coordinator_only(plan_pb2.Group(kind=kind, to_coordinator=True, shards=[0]))
    assert not is_for_coordinator_only(plan_pb2.Group(kind=kind, to_coordinator=True, to_wafers=True))
    assert is_for_coordinator_only(plan_pb2.Group(kind=plan_pb2.GROUP_KIND_OUTPUT))
