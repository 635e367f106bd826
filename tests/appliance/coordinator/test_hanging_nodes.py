"""A node that hangs is taken for dead where the job recovers: another has its place, and the user reads why."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from cluster_in_process import Client, ClusterInProcess

from appliance.coordinator.execution.failures import cause_of_replacement
from waferbox import deadlines
from waferbox.runtime import outbox, role_job
from wsc.v1 import management_pb2, node_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
NUM_STEPS = 40


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_HANG_SECONDS", "0.5")
    monkeypatch.setattr(outbox, "BATCH_SECONDS", 0.05)
    monkeypatch.setattr(deadlines, "ATTACHMENT", replace(deadlines.ATTACHMENT, hung_stop=0.1))


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs goes on when it is set; at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


class Hang:
    """A kernel that does not return, so many times."""

    def __init__(self, step: int, times: int, released: threading.Event) -> None:
        self.step = step
        self._times = times
        self._released = released

    def __call__(self, context: object, step: int) -> None:
        if step == self.step and self._times:
            self._times -= 1
            self._released.wait(60)


def test_a_node_that_hangs_is_replaced(
    cluster: ClusterInProcess, client: Callable[..., Client], released: threading.Event
) -> None:
    cluster.add(**{**FULL, "wafer": 2})
    cluster.behaviour.on_step["wafer-0"] = Hang(3, 1, released)
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    one.begin(NUM_STEPS)
    one.start()
    assert one.consume(NUM_STEPS) == list(range(1, NUM_STEPS + 1))
    one.receive("finished")
    cluster.until(lambda: cluster.jobs()[0].restarts)
    (restart,) = cluster.jobs()[0].restarts
    assert restart.cause.startswith("wafer-0 (pid ")
    assert " hangs in step 3: one action has taken more than " in restart.cause
    assert "coordinator/test_hanging_nodes.py:" in restart.cause
    assert "in __call__" in restart.cause
    hung, other = (node.address for module, node in cluster.nodes if module == "wafer")
    assert hung in restart.cause
    assert other in restart.replaced


def test_one_that_hangs_every_time_ends_the_job_with_all_causes(
    cluster: ClusterInProcess, client: Callable[..., Client], released: threading.Event
) -> None:
    cluster.add(**{**FULL, "wafer": 3})
    cluster.behaviour.on_step["wafer-0"] = Hang(3, 100, released)
    one = client(max_num_restarts=2, run_ahead_steps=4)
    one.compile()
    one.begin(NUM_STEPS)
    with contextlib.suppress(AssertionError):  # it may end before the first recovery point is complete
        one.start()
    failure = one.failure()
    assert failure.kind == node_pb2.Failure.KIND_NODE
    assert failure.message.count("hangs in step 3") == 3
    assert "WAFERBOX_HANG_SECONDS" in failure.message
    assert "max_num_restarts is 2" in failure.message
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED)


def test_a_slow_input_is_no_hang(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else's input_fn would be faster."""
    looks = threading.Semaphore(0)
    check = role_job.RoleJob.check_progress

    def count(job: role_job.RoleJob) -> None:
        check(job)
        if job.context.node == "worker-0":
            looks.release()

    monkeypatch.setattr(role_job.RoleJob, "check_progress", count)
    cluster.add(**FULL)
    made = threading.Event()

    def wait(context: Any, step: int) -> None:
        if step == 3:
            attached: Any = next(node._service._job for module, node in cluster.nodes if module == "workers")
            job = attached._job
            job._program.progress.waits = True
            made.wait(60)
            job._program.progress.waits = False

    cluster.behaviour.on_step["worker-0"] = wait
    one = client(max_num_restarts=3, run_ahead_steps=4)
    one.compile()
    one.begin(NUM_STEPS)
    one.start()
    for _ in range(40):  # four times what a hang takes
        assert looks.acquire(timeout=30)
    made.set()
    assert one.consume(NUM_STEPS) == list(range(1, NUM_STEPS + 1))
    assert not cluster.jobs()[0].restarts


def test_the_cause_is_one_line_with_the_end_of_the_stack() -> None:
    frames = "".join(f'  File "/usr/lib/one/{n}.py", line {n}, in f{n}\n    code\n' for n in range(1, 6))
    failure = node_pb2.Failure(node="wafer-1", message="wafer-1 hangs in step 7: so it is", traceback=frames)
    cause = cause_of_replacement(failure, "wafer-1 (pid 5 at host:1)")
    assert cause == (
        "wafer-1 (pid 5 at host:1) hangs in step 7: so it is (one/3.py:3 in f3, one/4.py:4 in f4, one/5.py:5 in f5)"
    )
    failure.traceback = ""
    assert cause_of_replacement(failure, "wafer-1") == "wafer-1 hangs in step 7: so it is"
