"""Which recovery point a job goes on from: one whose states are those of its execution, or none."""

import asyncio
import threading
from collections.abc import Callable

import numpy
import pytest
from cluster_in_process import Client, ClusterInProcess

from appliance.coordinator.execution.recovery_points import FIRST_POINT, LAST_POINT
from appliance.coordinator.execution_slot import ExecutionSlot
from waferbox import settings
from wsc.v1 import coordinator_pb2, node_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
NUM_STEPS = 5
MANY_STEPS = 100_000


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.REPLACEMENT_SECONDS.name, "20")


@pytest.fixture
def one(cluster: ClusterInProcess, client: Callable[..., Client]) -> Client:
    """A client that has compiled its step."""
    cluster.add(**FULL)
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    return one


def order_of(number: int) -> int:
    return number & LAST_POINT


def run(one: Client, last_step: int) -> None:
    for step in range(1, last_step + 1):
        outputs = one.receive_outputs()
        assert (outputs.step, numpy.frombuffer(outputs.tensors[0], numpy.float32)[0]) == (step, step)
        one.consumed(step)


def train(one: Client) -> None:
    one.begin(NUM_STEPS)
    one.start()
    run(one, NUM_STEPS)
    one.receive("finished")


def start(one: Client, *, wrote: bool) -> None:
    wanted = one.receive("state_wanted").state_wanted
    one.send(state_sent=coordinator_pb2.StateSent(attempt=wanted.attempt, wrote=wrote))
    one.receive("started")


def leave(cluster: ClusterInProcess, one: Client) -> None:
    """An execution is left by its client when some of its steps are done."""
    cluster.behaviour.may_begin["memoryx-0"] = lambda step: step <= NUM_STEPS  # it waits for no client
    one.begin(MANY_STEPS)
    one.start()
    run(one, 3)
    one.call.cancel()


def replace_memoryx(cluster: ClusterInProcess) -> None:
    cluster.kill(next(index for index, (role, _) in enumerate(cluster.nodes) if role == "memoryx"))
    cluster.add(memoryx=1)


def last_start(cluster: ClusterInProcess, count: int) -> node_pb2.Start:
    """The count-th, which is the last."""
    cluster.until(lambda: len(cluster.behaviour.starts.get("memoryx-0", ())) == count)
    start: node_pb2.Start = cluster.behaviour.starts["memoryx-0"][-1]
    return start


def last_load(cluster: ClusterInProcess) -> node_pb2.Load:
    load: node_pb2.Load = cluster.behaviour.loads["memoryx-0"][-1]
    return load


def test_an_execution_begins_with_the_end_of_the_one_before(cluster: ClusterInProcess, one: Client) -> None:
    train(one)
    end = last_start(cluster, 1).last_recovery_point
    one.begin(MANY_STEPS)
    start(one, wrote=False)
    assert not last_start(cluster, 2).recovery_point
    run(one, 3)
    replace_memoryx(cluster)
    assert not last_start(cluster, 3).done_steps
    assert last_load(cluster).recovery_point == end


def test_an_execution_that_begins_while_somebody_is_replaced_has_its_states_put_back(
    cluster: ClusterInProcess, one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore, restores = ExecutionSlot.restore, threading.Event()

    async def restore_when_it_has_begun(executions: ExecutionSlot) -> None:
        restores.set()
        while executions.current is None:
            await asyncio.sleep(0.01)
        await restore(executions)

    monkeypatch.setattr(ExecutionSlot, "restore", restore_when_it_has_begun)
    train(one)
    end = last_start(cluster, 1).last_recovery_point
    replace_memoryx(cluster)
    assert restores.wait(10)
    one.begin(NUM_STEPS)
    start(one, wrote=False)
    last_start(cluster, 2)
    assert last_load(cluster).recovery_point == end
    run(one, NUM_STEPS)


def test_if_that_end_could_not_be_kept_the_next_keeps_its_start(cluster: ClusterInProcess, one: Client) -> None:
    cluster.behaviour.gives_up = lambda number: order_of(number) == LAST_POINT
    train(one)
    one.begin(MANY_STEPS)
    start(one, wrote=False)
    first = last_start(cluster, 2).recovery_point
    assert order_of(first) == FIRST_POINT
    run(one, 3)
    replace_memoryx(cluster)
    last_start(cluster, 3)
    assert last_load(cluster).recovery_point == first


def test_after_one_that_was_left_the_next_keeps_its_start(cluster: ClusterInProcess, one: Client) -> None:
    leave(cluster, one)
    one.begin(NUM_STEPS)
    start(one, wrote=False)
    assert order_of(last_start(cluster, 2).recovery_point) == FIRST_POINT


def test_after_one_that_was_left_states_that_are_lost_are_those_of_any_of_its_steps(
    cluster: ClusterInProcess, one: Client
) -> None:
    leave(cluster, one)
    first = last_start(cluster, 1).recovery_point
    one.begin(NUM_STEPS)
    one.receive("state_wanted")
    replace_memoryx(cluster)
    start(one, wrote=False)
    assert last_load(cluster).recovery_point == first
    assert order_of(last_start(cluster, 2).recovery_point) == FIRST_POINT


@pytest.mark.parametrize("wrote", [True, False])
def test_nothing_is_gone_on_from_where_the_start_could_not_be_kept(
    cluster: ClusterInProcess, one: Client, wrote: bool
) -> None:
    if wrote:
        train(one)
        cluster.behaviour.gives_up = lambda number: True
    else:
        cluster.behaviour.gives_up = lambda number: order_of(number) == LAST_POINT
        train(one)
        cluster.behaviour.gives_up = lambda number: True
    one.begin(MANY_STEPS)
    start(one, wrote=wrote)
    run(one, 3)
    replace_memoryx(cluster)
    failure = one.failure()
    assert failure.kind == node_pb2.Failure.KIND_NODE
    assert "memoryx-0 (pid" in failure.message
    assert "no recovery point has the states that the job would resume from" in failure.message


def test_an_execution_does_not_begin_with_states_that_are_lost(cluster: ClusterInProcess, one: Client) -> None:
    cluster.behaviour.gives_up = lambda number: order_of(number) == LAST_POINT
    train(one)
    one.begin(NUM_STEPS)
    one.receive("state_wanted")
    replace_memoryx(cluster)
    failure = one.failure()
    assert failure.kind == node_pb2.Failure.KIND_NODE
    assert "the states that this execution begins with are lost" in failure.message


def test_what_the_client_has_written_is_wanted_again_on_the_end_of_the_one_before(
    cluster: ClusterInProcess, one: Client
) -> None:
    train(one)
    end = last_start(cluster, 1).last_recovery_point
    cluster.behaviour.keeps_points = False
    one.begin(NUM_STEPS)
    wanted = one.receive("state_wanted").state_wanted
    one.send(state_sent=coordinator_pb2.StateSent(attempt=wanted.attempt, wrote=True))
    last_start(cluster, 2)
    cluster.behaviour.keeps_points = True
    replace_memoryx(cluster)
    start(one, wrote=True)
    assert last_load(cluster).recovery_point == end
    assert order_of(last_start(cluster, 3).recovery_point) == FIRST_POINT
    run(one, NUM_STEPS)


def test_steps_that_are_run_again_are_not_stopped_though_the_client_has_all(
    cluster: ClusterInProcess, one: Client
) -> None:
    """The end was reached, and is lost with who kept the states: it has to be reached again."""
    cluster.behaviour.gives_up = lambda number: order_of(number) == LAST_POINT
    one.begin(NUM_STEPS, checkpoint_steps=(NUM_STEPS,))
    one.start()
    run(one, NUM_STEPS)
    one.receive("checkpoint")
    held, steps = threading.Event(), list[int]()

    def hold(context: object, step: int) -> None:
        if step == NUM_STEPS - 2:
            held.set()
            threading.Event().wait(1.0)  # a stop that is not due comes in this time
        steps.append(step)

    cluster.behaviour.on_step["memoryx-0"] = hold
    replace_memoryx(cluster)
    assert held.wait(20)
    one.send(checkpoint_released=coordinator_pb2.CheckpointReleased(step=NUM_STEPS))
    one.receive("finished")
    assert steps == list(range(1, NUM_STEPS + 1))
