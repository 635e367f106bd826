"""A job finds the successor of its dead coordinator, however late the successor serves."""

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from fake_cluster import until

from cstorch._internal.session.job import ClientJob
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ClusterUnreachableError, NodeLostError
from waferbox import deadlines, settings
from waferbox.rpc.server import INGRESS_KEY
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, management_pb2_grpc

JOB, TOKEN = "job-1", "secret"


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """A coordinator. Its first sessions are refused, as by an ingress that does not have its address yet."""

    # No client calls these, which the stubs call abstract.
    Compile = coordinator_pb2_grpc.CoordinatorServicer.Compile
    PrepareInput = coordinator_pb2_grpc.CoordinatorServicer.PrepareInput
    Execute = coordinator_pb2_grpc.CoordinatorServicer.Execute
    Shards = coordinator_pb2_grpc.CoordinatorServicer.Shards
    Finish = coordinator_pb2_grpc.CoordinatorServicer.Finish

    def __init__(self, server: grpc.Server, refused: int = 0) -> None:
        self.refused = refused
        self.sessions = 0
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, server)

    def break_sessions(self) -> None:
        for _ in range(self.sessions):
            self._ends.put(None)

    def Session(
        self, request: coordinator_pb2.SessionRequest, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.SessionResponse]:
        self.sessions += 1
        if self.sessions <= self.refused:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no coordinator of this cluster is at this address")
        yield coordinator_pb2.SessionResponse(opened=coordinator_pb2.SessionOpened())
        yield coordinator_pb2.SessionResponse(ready=coordinator_pb2.JobReady())
        self._ends.get()
        context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")


class Management(management_pb2_grpc.ManagementServicer):
    """Creates a job with one coordinator, and names another for it."""

    # No client calls these, which the stubs call abstract.
    Register = management_pb2_grpc.ManagementServicer.Register
    Coordinate = management_pb2_grpc.ManagementServicer.Coordinate
    AdoptJob = management_pb2_grpc.ManagementServicer.AdoptJob
    ListNodes = management_pb2_grpc.ManagementServicer.ListNodes
    ListJobs = management_pb2_grpc.ManagementServicer.ListJobs
    CancelJob = management_pb2_grpc.ManagementServicer.CancelJob
    SetPriority = management_pb2_grpc.ManagementServicer.SetPriority
    LabelJob = management_pb2_grpc.ManagementServicer.LabelJob
    Shutdown = management_pb2_grpc.ManagementServicer.Shutdown

    def __init__(self, server: grpc.Server) -> None:
        self.created = management_pb2.CreateJobResponse(job=JOB, token=TOKEN)
        self.successor = ""
        self.begin = time.monotonic()
        self.ingress_away_seconds = self.away_seconds = 0.0  # from the begin on
        management_pb2_grpc.add_ManagementServicer_to_server(self, server)

    def CreateJob(
        self, request: management_pb2.CreateJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.CreateJobResponse:
        return self.created

    def GetJob(
        self, request: management_pb2.GetJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.GetJobResponse:
        seconds = time.monotonic() - self.begin
        if seconds < self.away_seconds:
            if seconds > self.ingress_away_seconds:
                context.set_trailing_metadata(((INGRESS_KEY, ""),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "it is not there")
        return management_pb2.GetJobResponse(job=management_pb2.JobInfo(coordinator=self.successor))


class Served:
    """A server with a coordinator and a management service."""

    def __init__(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(8))
        self.coordinator = Coordinator(self._server)
        self.management = Management(self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        stopped = self._server.stop(None)
        self.coordinator.break_sessions()
        stopped.wait()


@pytest.fixture
def cluster() -> Iterator[Served]:
    """Management, and the successor of the first coordinator."""
    served = Served()
    served.management.successor = served.address
    yield served
    served.stop()


@pytest.mark.services
@pytest.mark.parametrize("refused", [0, 1, 3])
def test_a_coordinator_that_is_not_reached_at_once_is_tried_again(cluster: Served, refused: int) -> None:
    lost = Served()
    cluster.coordinator.refused = refused
    cluster.management.created.coordinator = lost.address
    job = ClientJob(cluster.address, ClusterConfig(), "")
    try:
        until(lambda: lost.coordinator.sessions)
        assert job.session.connection.coordinator == lost.address
        lost.stop()
        until(lambda: job.session.connection.incarnation)
        assert (job.session.connection.coordinator, job.session.connection.incarnation) == (cluster.address, 1)
        assert job.alive
        assert cluster.coordinator.sessions == refused + 1
    finally:
        job.close()


@pytest.mark.services
def test_a_coordinator_that_dies_before_the_client_reaches_it_has_a_successor(
    cluster: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, connect=0.5))
    lost = Served()
    lost.stop()
    cluster.management.created.coordinator = lost.address
    with monkeypatch.context() as patch:
        patch.setenv(settings.MAX_NUM_RESTARTS.name, "0")
        with pytest.raises(ClusterUnreachableError, match=lost.address):
            ClientJob(cluster.address, ClusterConfig(), "")
    job = ClientJob(cluster.address, ClusterConfig(), "")
    try:
        assert job.session.connection.coordinator == cluster.address
        until(lambda: cluster.coordinator.sessions)
        assert job.alive
    finally:
        job.close()


@pytest.mark.services
@pytest.mark.parametrize(
    ("ingress_away_seconds", "away_seconds", "is_found"),
    [(0.0, 0.2, True), (2.0, 2.2, True), (0.0, 3.0, False), (0.5, 4.0, False)],
    ids=["management", "management after the ingress", "management too long", "and after the ingress"],
)
def test_management_has_its_time_once_the_ingress_is_there(
    cluster: Served,
    monkeypatch: pytest.MonkeyPatch,
    ingress_away_seconds: float,
    away_seconds: float,
    is_found: bool,
) -> None:
    """Where all are started again, management may come last."""
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, script_away=1.0))
    # Behind a gateway, one server takes every session, whatever coordinator is named.
    management = cluster.management
    management.created.MergeFrom(management_pb2.CreateJobResponse(coordinator="behind-the-ingress:1", gateway=True))
    job = ClientJob(cluster.address, ClusterConfig(), "")
    try:
        until(lambda: cluster.coordinator.sessions)
        management.begin = time.monotonic()
        management.ingress_away_seconds, management.away_seconds = ingress_away_seconds, away_seconds
        cluster.coordinator.break_sessions()
        until(lambda: job.session.connection.incarnation or job.failure is not None)
        assert job.session.connection.incarnation == is_found
        assert is_found or isinstance(job.failure, NodeLostError)
    finally:
        job.close()
