"""Workers that begin in the middle of an execution: their batches are those of a worker that was there all the time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import input_functions
import pytest
from worker_rig import ROWS, Wafer, start, worker_plan

from workers.worker_program import WorkerJob
from wsc.v1 import node_pb2

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("forked")]

NUM_STEPS = 28  # of five batches a pass
DONE_STEPS = 14
NUM_WORKERS = 2  # of a wafer
Prepare = Callable[..., node_pb2.PrepareInput]
Labels = list[list[int]]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def supply(
    stack: ExitStack,
    request: node_pb2.PrepareInput,
    num_csx: int,
    *,
    done_steps: int = 0,
    recovery_step: int = 0,
    **load: Any,
) -> tuple[Labels, list[node_pb2.InputState]]:
    """The labels of all batches of a worker from done_steps on, and the states of its loader."""
    wafer = Wafer(node_pb2.LANE_SHARED_MEMORY)
    stack.callback(wafer.close)
    job = WorkerJob(wafer.context)
    stack.callback(job.close)
    job.prepare_input(request)
    wafer.load(job, worker_plan(3, num_csx), done_steps=done_steps, **load)
    if recovery_step:
        job.keep_recovery_point(node_pb2.KeepRecoveryPoint(epoch=1, step=recovery_step))
    start(job, NUM_STEPS, done_steps=done_steps)
    steps = range(1 + request.worker, NUM_STEPS - done_steps + 1, NUM_WORKERS)
    labels = [wafer.receive(step) for step in steps]
    states = []
    while not (response := wafer.response()).HasField("finished"):
        assert response.HasField("input_state"), response
        states.append(response.input_state)
    return labels, states


def workers(prepare: Prepare, num_csx: int, *recipe: Any) -> list[node_pb2.PrepareInput]:
    """The requests for all, wafer by wafer; with the same random state."""
    first = prepare(*recipe)
    requests = []
    for wafer in range(num_csx):
        for worker in range(NUM_WORKERS):
            where = node_pb2.PrepareInput(
                loader="train", wafer=wafer, worker=worker, num_workers=NUM_WORKERS, num_csx=num_csx
            )
            requests.append(node_pb2.PrepareInput())
            requests[-1].CopyFrom(first)
            requests[-1].MergeFrom(where)
    return requests


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param((input_functions.random_rows, ROWS), id="shuffled, two processes"),
        pytest.param((input_functions.augmented_rows, ROWS, 0), id="random augmentations"),
        pytest.param((input_functions.augmented_rows, ROWS, 2), id="random augmentations, two processes"),
        pytest.param((input_functions.counting, ROWS), id="several passes of a generator"),
        pytest.param((input_functions.sampled, ROWS, 2), id="sampler that shards"),
    ],
)
def test_what_was_used_is_skipped(stack: ExitStack, prepare: Prepare, recipe: Any) -> None:
    request = workers(prepare, 1, *recipe)[1]
    whole, states = supply(stack, request, 1)
    assert not states
    rest, _ = supply(stack, request, 1, done_steps=DONE_STEPS)
    assert rest == whole[DONE_STEPS // NUM_WORKERS :]
    assert len({tuple(labels) for labels in whole}) > 2


@pytest.mark.parametrize(
    ("recipe", "num_csx"),
    [
        pytest.param((input_functions.sampled, ROWS), 2, id="sampler that shards"),
        pytest.param((input_functions.sampled, ROWS, 2), 1, id="sampler that shards, two processes"),
        pytest.param((input_functions.restartable, ROWS), 1, id="batches that are dealt out"),
    ],
)
def test_a_loader_that_can_be_resumed_skips_nothing(
    stack: ExitStack, prepare: Prepare, recipe: Any, num_csx: int
) -> None:
    requests = workers(prepare, num_csx, *recipe)
    told = [supply(stack, request, num_csx, recovery_step=DONE_STEPS) for request in requests]
    assert all([state.step for state in states] == [DONE_STEPS] for _, states in told)
    states = [state.state for _, (state,) in told]
    for (whole, _), request in zip(told, requests, strict=True):
        rest, (later,) = supply(
            stack,
            request,
            num_csx,
            done_steps=DONE_STEPS,
            input_states=states,
            state_steps=[NUM_STEPS],
        )
        assert rest == whole[DONE_STEPS // NUM_WORKERS :]
        assert (later.epoch, later.step) == (1, NUM_STEPS)


def test_a_loader_that_cannot_be_resumed_has_no_state_for_a_recovery_point(stack: ExitStack, prepare: Prepare) -> None:
    (_, request) = workers(prepare, 1, input_functions.counting, ROWS)
    _, (state,) = supply(stack, request, 1, recovery_step=DONE_STEPS)
    assert (state.step, state.state) == (DONE_STEPS, b"")


def test_a_recovery_point_that_is_too_near_has_no_state(stack: ExitStack, prepare: Prepare) -> None:
    (_, request) = workers(prepare, 1, input_functions.restartable, ROWS)
    assert supply(stack, request, 1, done_steps=DONE_STEPS, recovery_step=DONE_STEPS)[1] == []


def test_an_execution_of_which_all_steps_are_done_is_over_at_once(stack: ExitStack, prepare: Prepare) -> None:
    (request, _) = workers(prepare, 1, input_functions.counting, ROWS)
    assert supply(stack, request, 1, done_steps=NUM_STEPS) == ([], [])
