"""A coordinator that ends by itself has a successor, which has the job and its nodes; but not for ever."""

import os
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from cluster_in_process import ClusterInProcess

from appliance.coordinator import settings as coordinator_settings
from appliance.coordinator.settings import CoordinatorSettings, read_settings
from waferbox import deadlines
from waferbox.launch.spawn import SpawnError
from waferbox.rpc.server import make_channel, status_of
from waferbox.security.tokens import Kind, cluster_secret
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import management_pb2, management_pb2_grpc

WAIT_SECONDS = 30.0
ACQUIRE = management_pb2.Acquire(num_wafers=1, num_workers_per_wafer=1)


class FakeCoordinator:
    """Says hello and asks for nodes, and ends as it is told to."""

    cause = ""

    def __init__(self, settings: CoordinatorSettings, number: int, cluster: ClusterInProcess) -> None:
        self.settings = settings
        self._over: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._ended = os.eventfd(0)
        self._requests: queue.SimpleQueue[management_pb2.CoordinateRequest | None] = queue.SimpleQueue()
        hello = management_pb2.CoordinatorHello(job=settings.job, token=settings.token, address=f"h:{number}")
        self.say(hello=hello)
        self.say(acquire=ACQUIRE)
        self._channel = make_channel(cluster.address, cluster_secret().token(Kind.COORDINATOR, settings.job))
        self._call = management_pb2_grpc.ManagementStub(self._channel).Coordinate(iter(self._requests.get, None))

    def nodes(self) -> list[management_pb2.NodeInfo]:
        """Waits until it has them."""
        for response in self._call:
            if response.WhichOneof("kind") == "acquired":
                return list(response.acquired.nodes)
        raise AssertionError("the stream has ended")

    def say(self, **kind: Any) -> None:
        self._requests.put(management_pb2.CoordinateRequest(**kind))

    def end(self, status: int) -> None:
        self._call.cancel()  # type: ignore[no-untyped-call]  # without types in the stubs
        self._requests.put(None)
        self.exit(status)

    def exit(self, status: int) -> None:
        self._over.put(status)
        os.eventfd_write(self._ended, 1)

    def fileno(self) -> int:
        return self._ended

    def wait(self) -> int:
        return self._over.get(timeout=WAIT_SECONDS)

    def terminate(self) -> None:
        self.end(0)

    def kill(self) -> None:
        self.end(-9)

    def close(self, deadline_seconds: float = 0.0) -> int:
        self._channel.close()
        return 0


class Coordinators:
    """Those that management has started."""

    def __init__(self, cluster: ClusterInProcess) -> None:
        self._cluster = cluster
        self._changed = threading.Condition()
        self.started: list[FakeCoordinator] = []
        self.error: SpawnError | None = None
        self.refused = 0

    def spawn(self, module: str, argv: object, fds: list[int], *, outlives: bool, end_signal: int) -> FakeCoordinator:
        settings = read_settings(os.dup(fds[0]))
        if self.error is not None:
            self.refused += 1
            raise self.error
        with self._changed:
            self.started.append(FakeCoordinator(settings, len(self.started), self._cluster))
            self._changed.notify_all()
            return self.started[-1]

    def wait_for(self, number: int) -> FakeCoordinator:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.started) >= number, WAIT_SECONDS)
            return self.started[number - 1]


@pytest.fixture
def coordinators(cluster: ClusterInProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinators]:
    coordinators = Coordinators(cluster)
    monkeypatch.setattr(coordinator_settings, "spawn", coordinators.spawn)
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    yield coordinators
    for one in coordinators.started:
        one.end(0)


def create(cluster: ClusterInProcess, max_num_restarts: int = 3, process_id: int = 0) -> str:
    request = management_pb2.CreateJobRequest(
        version=WIRE_VERSION,
        num_csx=1,
        num_workers_per_csx=1,
        max_num_restarts=max_num_restarts,
        process_id=process_id,
    )
    return str(cluster.stub.CreateJob(request, timeout=WAIT_SECONDS).job)


def job(cluster: ClusterInProcess, name: str) -> management_pb2.JobInfo:
    return cluster.stub.GetJob(management_pb2.GetJobRequest(job=name), timeout=WAIT_SECONDS).job


def test_another_takes_up_the_job_and_has_its_nodes(cluster: ClusterInProcess, coordinators: Coordinators) -> None:
    name = create(cluster)
    first = coordinators.wait_for(1)
    nodes = first.nodes()
    assert not first.settings.restarted
    first.end(-9)
    second = coordinators.wait_for(2)
    assert second.settings.restarted
    assert (second.settings.job, second.settings.token, second.settings.created) == (
        first.settings.job,
        first.settings.token,
        first.settings.created,
    )
    assert [(node.member, node.address) for node in second.nodes()] == [(node.member, node.address) for node in nodes]
    assert job(cluster, name).coordinator == "h:1"  # where clients find it
    second.say(report=management_pb2.JobReport(phase=management_pb2.JOB_PHASE_SUCCEEDED))
    cluster.until(lambda: job(cluster, name).phase == management_pb2.JOB_PHASE_SUCCEEDED)
    second.end(0)
    cluster.until(lambda: cluster.free_nodes() == 4)
    assert len(coordinators.started) == 2


def end_each(coordinators: Coordinators, count: int, status: int) -> None:
    """Ends the first coordinators of a job, each when it has its nodes."""
    for number in range(1, count + 1):
        one = coordinators.wait_for(number)
        one.nodes()
        one.end(status)


def test_a_job_whose_coordinators_end_again_and_again_fails(
    cluster: ClusterInProcess, coordinators: Coordinators
) -> None:
    name = create(cluster)
    end_each(coordinators, 4, -9)
    cluster.until(lambda: job(cluster, name).ended)
    ended = job(cluster, name)
    assert ended.phase == management_pb2.JOB_PHASE_FAILED
    assert ended.message == "its coordinator ended with status -9, the last of 4 in 60 s"
    cluster.until(lambda: cluster.free_nodes() == 4)
    assert len(coordinators.started) == 4


def test_a_script_that_ends_with_its_own_cluster_has_not_failed(
    cluster: ClusterInProcess, coordinators: Coordinators
) -> None:
    name = create(cluster, process_id=4711)
    one = coordinators.wait_for(1)
    one.nodes()
    supervision = cluster.service._supervisor._supervisions[name]
    cluster.call(lambda: setattr(supervision, "_is_closing", True))
    one.end(coordinator_settings.CUT_OFF_STATUS)
    cluster.until(lambda: job(cluster, name).ended)
    ended = job(cluster, name)
    assert ended.phase == management_pb2.JOB_PHASE_CANCELLED
    assert ended.message == "the script (pid 4711) has ended, or its connection broke, and its cluster went down"


def test_a_coordinator_that_lost_its_script_is_named(cluster: ClusterInProcess, coordinators: Coordinators) -> None:
    name = create(cluster, max_num_restarts=1)
    end_each(coordinators, 2, coordinator_settings.CUT_OFF_STATUS)
    cluster.until(lambda: job(cluster, name).ended)
    assert job(cluster, name).message == "the connection to its script broke, the last of 2 in 60 s"


def test_one_that_cannot_be_started_at_once_is_tried_again(
    cluster: ClusterInProcess, coordinators: Coordinators
) -> None:
    name = create(cluster, max_num_restarts=1)
    one = coordinators.wait_for(1)
    one.nodes()
    coordinators.error = SpawnError("the fork server is away")
    one.end(-9)
    cluster.until(lambda: coordinators.refused > 2)
    coordinators.error = None
    coordinators.wait_for(2).end(0)
    cluster.until(lambda: job(cluster, name).ended)


def test_one_that_cannot_be_started_again_ends_the_job(
    cluster: ClusterInProcess, coordinators: Coordinators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, spawn=0.3))
    name = create(cluster)
    one = coordinators.wait_for(1)
    one.nodes()
    coordinators.error = SpawnError("no memory")
    one.end(-9)
    cluster.until(lambda: job(cluster, name).ended)
    assert job(cluster, name).message.startswith("its coordinator ended with status -9")


def test_one_that_ends_before_it_has_come_has_a_successor_but_not_for_ever(
    cluster: ClusterInProcess, coordinators: Coordinators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCoordinator, "say", lambda self, **kind: self.end(3) if kind.get("acquire") else None)
    monkeypatch.setattr(FakeCoordinator, "end", FakeCoordinator.exit)
    reason = r"its coordinator ended with status 3, the last of 3 in 60 s\. .*start the cluster again"
    with pytest.raises(grpc.RpcError, match=reason) as caught:
        create(cluster, max_num_restarts=2)
    assert status_of(caught.value).code() is grpc.StatusCode.FAILED_PRECONDITION
    assert [one.settings.restarted for one in coordinators.started] == [False] * 3
    with pytest.raises(grpc.RpcError, match="its coordinator ended with status 3"):
        create(cluster, max_num_restarts=0)
    assert len(coordinators.started) == 4
    assert cluster.free_nodes() == 4


@pytest.mark.parametrize("way", ["it ends in good order", "the job is cancelled", "it does not restart"])
def test_none_takes_up_a_job_that_is_over(cluster: ClusterInProcess, coordinators: Coordinators, way: str) -> None:
    name = create(cluster, max_num_restarts=0 if way == "it does not restart" else 3)
    one = coordinators.wait_for(1)
    one.nodes()
    if way == "the job is cancelled":
        cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=name))
    one.end(0 if way == "it ends in good order" else -9)
    cluster.until(lambda: job(cluster, name).ended)
    expected = management_pb2.JOB_PHASE_CANCELLED if "cancelled" in way else management_pb2.JOB_PHASE_FAILED
    assert job(cluster, name).phase == expected
    cluster.until(lambda: cluster.free_nodes() == 4)
    assert len(coordinators.started) == 1
