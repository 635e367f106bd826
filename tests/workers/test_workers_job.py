"""A worker's job against a wafer that this test plays, over real links."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import input_functions
import pytest
from worker_rig import ROWS, Wafer, start, worker_plan

from waferbox.input_process.batch_digest import batch_digest
from waferbox.runtime.node_job import JobFailure
from waferbox.runtime.schedule import BATCH_SLOTS
from workers.worker_program import WorkerJob
from wsc.v1 import node_pb2

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("forked")]

LANES = {"shared memory": node_pb2.LANE_SHARED_MEMORY, "grpc": node_pb2.LANE_GRPC}
Prepare = Callable[..., node_pb2.PrepareInput]


@pytest.fixture(params=LANES.values(), ids=list(LANES))
def wafer(request: pytest.FixtureRequest) -> Iterator[Wafer]:
    wafer = Wafer(request.param)
    yield wafer
    wafer.close()


@pytest.fixture
def job(wafer: Wafer) -> Iterator[WorkerJob]:
    job = WorkerJob(wafer.context)
    yield job
    job.close()


@pytest.mark.parametrize("columns", [3, 3000], ids=["inline", "large"])
def test_two_workers_of_the_second_of_two_wafers(wafer: Wafer, job: WorkerJob, prepare: Prepare, columns: int) -> None:
    """Worker 1 of 2 supplies steps 2, 4, 6 ... with the second half of batches 1, 3, 5 ... of the passes."""
    where = {"loader": "train", "wafer": 1, "num_csx": 2, "worker": 1, "num_workers": 2}
    job.prepare_input(prepare(input_functions.counting, ROWS, columns, **where))
    wafer.load(job, worker_plan(columns, num_csx=2))
    start(job, num_steps=13)
    for step in range(2, 14, 2):
        batch = (step - 1) % 5
        assert wafer.receive(step) == [batch * 100 + row for row in range(4, 8)]
    finished = wafer.response().finished
    assert finished.epoch == 1
    assert set(finished.seconds) == {"total", "input", "wait", "send"}


def test_a_second_execution_begins_anew(wafer: Wafer, job: WorkerJob, prepare: Prepare) -> None:
    job.prepare_input(prepare(input_functions.counting, ROWS, loader="train"))
    for epoch in (1, 2):
        wafer.load(job, worker_plan(3, 1), epoch)
        start(job, 3, epoch)
        assert [wafer.receive(step)[0] for step in (1, 2, 3)] == [0, 100, 200]
        assert wafer.response().finished.epoch == epoch
        job.stop(epoch)


def test_slots_are_not_written_before_they_are_acknowledged(wafer: Wafer, job: WorkerJob, prepare: Prepare) -> None:
    job.prepare_input(prepare(input_functions.counting, ROWS, 3000, BATCH_SLOTS + 2, loader="train"))
    wafer.load(job, worker_plan(3000, 1))
    start(job, BATCH_SLOTS + 2)
    for step in range(1, BATCH_SLOTS + 1):
        assert wafer.receive(step, acknowledge=False)[0] == (step - 1) * 100
    assert wafer.link is not None
    wafer.link.ack(1)
    assert wafer.receive(BATCH_SLOTS + 1, acknowledge=False)[0] == BATCH_SLOTS * 100
    wafer.link.ack(BATCH_SLOTS + 1)
    assert wafer.receive(BATCH_SLOTS + 2)[0] == (BATCH_SLOTS + 1) * 100
    assert wafer.response().HasField("finished")


def test_the_users_traceback_comes_with_the_failure(wafer: Wafer, job: WorkerJob, prepare: Prepare) -> None:
    job.prepare_input(prepare(input_functions.raising_later, ROWS, loader="train"))
    wafer.load(job, worker_plan(3, 1))
    start(job, 10)
    assert [wafer.receive(step)[0] for step in (1, 2)] == [0, 100]
    failure = wafer.response().failed
    assert failure.kind == node_pb2.Failure.KIND_INPUT
    assert failure.node == "worker-0"
    assert failure.step == 3
    assert "ValueError: no such file: mnist.gz" in failure.message
    assert "in raise_here" in failure.traceback


def test_a_slow_input_fn_is_left(wafer: Wafer, job: WorkerJob, prepare: Prepare) -> None:
    job.prepare_input(prepare(input_functions.slow, 600.0, loader="train"))
    wafer.load(job, worker_plan(3, 1))
    start(job, 10)
    begin = time.monotonic()
    job.stop(1)
    assert time.monotonic() - begin < 3
    assert wafer.emitted.empty()


def test_a_wafer_that_goes_away(wafer: Wafer, job: WorkerJob, prepare: Prepare) -> None:
    job.prepare_input(prepare(input_functions.counting, ROWS, loader="train"))
    wafer.load(job, worker_plan(3, 1))
    start(job, 100)
    wafer.receive(1)
    assert wafer.link is not None
    wafer.link.close()
    wafer.link = None
    failure = wafer.response().failed
    assert (failure.kind, failure.peer) == (node_pb2.Failure.KIND_NODE, "wafer-0")


def test_a_folder_that_is_not_there(prepare: Prepare, job: WorkerJob, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(
        JobFailure, match=rf"worker-0 on .* has no folder '{missing}' \(mount_dirs.*make it there"
    ) as caught:
        job.prepare_input(prepare(input_functions.counting, ROWS, mount_dirs=[str(tmp_path), missing]))
    assert caught.value.kind == node_pb2.Failure.KIND_USER


def test_a_position_that_is_wanted_comes_with_its_execution(wafer: Wafer, job: WorkerJob, prepare: Prepare) -> None:
    """Worker 1 of 2, which the batches of steps 2, 4 are dealt to: the state after step 3 is behind batch 3."""
    job.prepare_input(
        prepare(
            input_functions.restartable, ROWS, loader="train", worker=1, num_workers=2, position=({"batch": 2}, True)
        )
    )
    wafer.load(job, worker_plan(3, 1), epoch=4, state_steps=[1, 3])
    start(job, 4, epoch=4)
    assert [wafer.receive(step)[0] for step in (2, 4)] == [300, 500]
    states = [wafer.response().input_state for _ in range(2)]
    assert [(state.epoch, state.step, state.state) for state in states] == [
        (4, 1, b'["dict", ["batch", 3]]'),
        (4, 3, b'["dict", ["batch", 5]]'),
    ]
    assert wafer.response().HasField("finished")


def test_input_that_nobody_prepared(wafer: Wafer, job: WorkerJob, prepare: Prepare) -> None:
    with pytest.raises(Exception, match="no input was prepared as 'train'"):
        wafer.load(job, worker_plan(3, 1))


@pytest.mark.parametrize("done_steps", [0, 2])
def test_the_first_batch_is_reported_where_the_execution_begins(
    wafer: Wafer, job: WorkerJob, prepare: Prepare, done_steps: int
) -> None:
    job.prepare_input(prepare(input_functions.counting, ROWS, loader="train"))
    wafer.load(job, worker_plan(3, 1), done_steps=done_steps)
    start(job, 4, done_steps=done_steps)
    for step in range(1, 5 - done_steps):
        wafer.receive(step)
    response = wafer.emitted.get(timeout=20)
    if done_steps:
        assert response.HasField("finished")
        return
    values, labels = next(iter(input_functions.counting(ROWS)))
    found = response.input_digests.first_batch
    assert (found.layout, found.values) == batch_digest([values, labels])
    assert wafer.response().HasField("finished")
