"""A defect in any task, timer or thread of a coordinator or a node ends the job, with its traceback."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from cluster_in_process import Client, ClusterInProcess

from appliance.coordinator.driver import JobDriver
from appliance.coordinator.job import CoordinatedJob
from appliance.coordinator.management_link import ManagementLink
from appliance.coordinator.nodes.job_nodes import Attachment
from appliance.coordinator.service import CoordinatorService
from waferbox import deadlines
from waferbox.host.threads import GuardedThread
from waferbox.runtime import outbox
from waferbox.runtime.node_service import NodeService, _Commands
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, node_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
DEADLINE = 30.0

# By the beginning of the thread's name, and what a client has done when the thread is there.
THREADS = {
    "results": "started",
    "execution-wafer-0": "started",
}
# The coroutines of tasks of the coordinator and of nodes, and what a client has done when the task is there.
TASKS = {
    (JobDriver, "run"): "created",
    (ManagementLink, "_keep_stream"): "created",
    (Attachment, "_read"): "created",
    (CoordinatorService, "_read_requests"): "started",
    (NodeService, "_work"): "created",
    (_Commands, "_read_ahead"): "created",
}


class Defect(Exception):
    """Injected."""


@pytest.fixture
def break_thread(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """break_thread(name): from now on threads of that name raise Defect instead of what they are for."""

    def make(name: str) -> None:
        run = threading.Thread.run
        guarded = GuardedThread.run

        def break_target(self: threading.Thread) -> None:
            if self.name == name:
                raise Defect(f"in {name}")
            run(self)

        def break_guarded(self: GuardedThread) -> None:
            if self.name == name:

                def work() -> None:
                    raise Defect(f"in {name}")

                self._work = work
            guarded(self)

        monkeypatch.setattr(threading.Thread, "run", break_target)
        monkeypatch.setattr(GuardedThread, "run", break_guarded)

    return make


def defect_in(name: str) -> Callable[..., Any]:
    async def work(*arguments: object) -> None:
        raise Defect(f"in {name}")

    return work


def failure_of(one: Client) -> node_pb2.Failure:
    """What the session tells last; the test fails where nothing comes."""
    told: list[coordinator_pb2.SessionResponse] = []
    reader = threading.Thread(target=lambda: told.extend(one.session), daemon=True)
    reader.start()
    reader.join(DEADLINE)
    assert not reader.is_alive(), "the job goes on for ever"
    failure: node_pb2.Failure = told[-1].failure
    return failure


def assert_ends_the_job(
    cluster: ClusterInProcess, client: Callable[..., Client], name: str, *, is_started: bool
) -> None:
    one = client()
    if is_started:
        one.compile()
        one.begin(1000)
        one.send(state_sent=coordinator_pb2.StateSent(attempt=1))  # to what is asked for soon
    failure = failure_of(one)
    assert failure.kind == node_pb2.Failure.KIND_INTERNAL, failure
    assert f"Defect: in {name}" in failure.message
    assert "test_thread_defects.py" in failure.traceback
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED, DEADLINE)


@pytest.mark.defects
@pytest.mark.parametrize("name", THREADS)
def test_a_defect_in_a_thread_ends_the_job_with_its_traceback(
    cluster: ClusterInProcess, client: Callable[..., Client], break_thread: Callable[[str], None], name: str
) -> None:
    cluster.add(**FULL)
    break_thread(name)
    assert_ends_the_job(cluster, client, name, is_started=THREADS[name] == "started")


@pytest.mark.defects
@pytest.mark.parametrize(("owner", "name"), TASKS)
def test_a_defect_in_a_task_ends_the_job_with_its_traceback(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    cluster.add(**FULL)
    monkeypatch.setattr(owner, name, defect_in(name))
    assert_ends_the_job(cluster, client, name, is_started=TASKS[owner, name] == "started")


@pytest.mark.defects
def test_a_defect_in_the_timeout_of_the_session_ends_the_job(
    cluster: ClusterInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from waferbox.wire_version import WIRE_VERSION

    def cancelled(job: CoordinatedJob, message: str) -> None:
        raise Defect("in the timeout")

    monkeypatch.setattr(CoordinatedJob, "_cancelled", cancelled)
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, session=1.0))
    cluster.add(**FULL)
    cluster.stub.CreateJob(
        management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1), timeout=20
    )
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED, DEADLINE)
    assert "Defect: in the timeout" in cluster.jobs()[0].message


def test_a_defect_in_what_is_done_every_second_ends_the_job(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    from appliance.coordinator import serving
    from appliance.coordinator.observation.events import Observation

    def tick(self: Observation) -> None:
        raise Defect("in a tick")

    monkeypatch.setattr(serving, "TICK_SECONDS", 0.05)
    cluster.add(**FULL)
    one = client()
    one.compile()
    monkeypatch.setattr(Observation, "tick", tick)
    assert "Defect: in a tick" in failure_of(one).message


@pytest.mark.defects
def test_a_client_that_comes_after_the_end_hears_of_it(
    cluster: ClusterInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from waferbox.rpc.server import make_channel
    from waferbox.wire_version import WIRE_VERSION

    ended = threading.Event()
    close = CoordinatedJob.close

    async def note_end(job: CoordinatedJob) -> None:
        await close(job)
        ended.set()

    monkeypatch.setattr(CoordinatedJob, "close", note_end)
    monkeypatch.setattr(deadlines, "END", replace(deadlines.END, last_messages=DEADLINE))
    cluster.add(**FULL)
    monkeypatch.setattr(ManagementLink, "_keep_stream", defect_in("the stream"))
    created = cluster.stub.CreateJob(
        management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1), timeout=20
    )
    assert ended.wait(DEADLINE)
    with make_channel(created.coordinator, created.token) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        _opened, told = stub.Session(coordinator_pb2.SessionRequest(token=created.token), timeout=DEADLINE)
    assert "Defect: in the stream" in told.failure.message


# --- roles that hang --------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel() -> Iterator[threading.Event]:
    """A kernel returns when it is set; at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


def test_a_role_whose_kernel_never_returns_is_named_with_its_stack(
    cluster: ClusterInProcess, client: Callable[..., Client], kernel: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAFERBOX_HANG_SECONDS", "0.3")
    monkeypatch.setattr(outbox, "BATCH_SECONDS", 0.05)
    cluster.add(**FULL)

    def never_return(context: Any, step: int) -> None:
        if step == 3:
            kernel.wait(DEADLINE)

    cluster.behaviour.on_step["wafer-0"] = never_return
    one = client()
    one.compile()
    one.begin(1000)
    one.start()
    failure = failure_of(one)
    assert (failure.kind, failure.node) == (node_pb2.Failure.KIND_INTERNAL, "wafer-0")
    assert "wafer-0 hangs in step 3" in failure.message
    assert "in never_return" in failure.traceback


def test_a_role_that_says_nothing_is_named(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose interpreter hangs: its server still answers pings."""
    from appliance.coordinator import serving
    from waferbox.runtime.role_job import RoleJob

    monkeypatch.setenv("WAFERBOX_HANG_SECONDS", "60")  # 20 ticks of silence
    monkeypatch.setattr(serving, "TICK_SECONDS", 0.05)
    report = RoleJob.report
    monkeypatch.setattr(RoleJob, "report", lambda job: None if job.context.node == "memoryx-0" else report(job))
    from waferbox.runtime import outbox

    monkeypatch.setattr(outbox, "BATCH_SECONDS", 0.02)
    cluster.add(**FULL)
    one = client()
    one.compile()
    one.begin(1000)
    one.start()
    failure = failure_of(one)
    assert (failure.kind, failure.node) == (node_pb2.Failure.KIND_NODE, "memoryx-0")
    assert "hangs" in failure.message


def test_a_client_that_takes_its_time_makes_nobody_hang(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roles wait for it all the while, and owe nothing."""
    monkeypatch.setenv("WAFERBOX_HANG_SECONDS", "0.2")
    monkeypatch.setattr(outbox, "BATCH_SECONDS", 0.02)
    looks = threading.Semaphore(0)
    from waferbox.runtime.role_job import RoleJob

    check = RoleJob.check_progress

    def count(job: RoleJob) -> None:
        check(job)
        looks.release()

    monkeypatch.setattr(RoleJob, "check_progress", count)
    cluster.add(**FULL)
    one = client(run_ahead_steps=2)
    one.compile()
    one.begin(4)
    one.start()
    assert one.receive_outputs().step == 1
    for _ in range(120):  # of four roles: about three times what a hang takes
        assert looks.acquire(timeout=DEADLINE)
    for step in range(1, 5):
        one.consumed(step)
    assert one.receive_outputs().step == 2
