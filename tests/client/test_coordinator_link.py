"""Where the coordinator of a job has died, the client finds the one that has taken it up, however late it serves."""

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from cstorch._internal.session.coordinator_link import CoordinatorLink
from cstorch.errors import ClusterUnreachableError
from waferbox import deadlines
from waferbox.rpc.server import INGRESS_KEY, make_channel
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, management_pb2_grpc

JOB, TOKEN = "job-1", "secret"


class Served:
    """A coordinator. Its first sessions are refused, as by an ingress that knows nothing of it yet."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.sessions = 0
        self.ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._service = Service(self)
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self._service, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        """Calls break off."""
        stopped = self._server.stop(None)
        for _ in range(self.sessions):
            self.ends.put(None)  # for the threads that serve sessions
        stopped.wait()


class Service(coordinator_pb2_grpc.CoordinatorServicer):
    def __init__(self, served: Served) -> None:
        self._served = served

    def Session(
        self, request: coordinator_pb2.SessionRequest, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.SessionResponse]:
        served = self._served
        served.sessions += 1
        if served.sessions <= served.refused:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no coordinator of this cluster is at this address")
        yield coordinator_pb2.SessionResponse(opened=coordinator_pb2.SessionOpened())
        yield coordinator_pb2.SessionResponse(ready=coordinator_pb2.JobReady())
        served.ends.get()


class Management(management_pb2_grpc.ManagementServicer):
    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self.begin = time.monotonic()
        self.ingress_away_seconds = self.away_seconds = 0.0  # from the begin on

    def GetJob(
        self, request: management_pb2.GetJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.GetJobResponse:
        seconds = time.monotonic() - self.begin
        if seconds < self.away_seconds:
            if seconds > self.ingress_away_seconds:
                context.set_trailing_metadata(((INGRESS_KEY, ""),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "it is not there")
        return management_pb2.GetJobResponse(job=management_pb2.JobInfo(coordinator=self._coordinator))


@pytest.fixture
def another() -> Iterator[Served]:
    served = Served(refused=0)
    yield served
    served.stop()


@pytest.fixture
def service(another: Served) -> Management:
    """It names the other coordinator."""
    return Management(another.address)


@pytest.fixture
def management(service: Management) -> Iterator[grpc.Channel]:
    """To the service."""
    server = grpc.server(ThreadPoolExecutor(2))
    management_pb2_grpc.add_ManagementServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with make_channel(address, TOKEN) as channel:
        yield channel
    server.stop(None).wait()


@pytest.mark.services
@pytest.mark.parametrize("refused", [0, 1, 3])
def test_a_coordinator_that_is_not_reached_at_once_is_tried_again(
    another: Served, management: grpc.Channel, refused: int
) -> None:
    lost = Served(refused=0)
    another.refused = refused
    created = management_pb2.CreateJobResponse(job=JOB, coordinator=lost.address, token=TOKEN)
    link = CoordinatorLink(created, "", management_pb2_grpc.ManagementStub(management), may_be_replaced=True)
    try:
        session = link.current.session
        assert [next(session).WhichOneof("kind") for _ in range(2)] == ["opened", "ready"]
        lost.stop()
        with pytest.raises(grpc.RpcError) as error:
            next(session)
        assert link.replace(error.value)
        assert (link.current.coordinator, link.current.incarnation) == (another.address, 1)
        assert next(link.current.session).HasField("ready")
        assert another.sessions == refused + 1
    finally:
        link.close()
        link.close_channel()


@pytest.mark.services
def test_a_coordinator_that_dies_before_the_client_reaches_it_has_a_successor(
    another: Served, management: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, connect=0.5))
    lost = Served(refused=0)
    lost.stop()
    created = management_pb2.CreateJobResponse(job=JOB, coordinator=lost.address, token=TOKEN)
    stub = management_pb2_grpc.ManagementStub(management)
    with pytest.raises(ClusterUnreachableError, match=lost.address):
        CoordinatorLink(created, "", stub, may_be_replaced=False)
    link = CoordinatorLink(created, "", stub, may_be_replaced=True)
    try:
        assert link.current.coordinator == another.address
        assert next(link.current.session).HasField("opened")
    finally:
        link.close()
        link.close_channel()


class Broken(grpc.RpcError, grpc.Call):  # type: ignore[misc]  # abstract
    """How a session ends whose ingress has died."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


@pytest.mark.services
@pytest.mark.parametrize(
    ("ingress_away_seconds", "away_seconds", "is_found"),
    [(0.0, 0.2, True), (2.0, 2.2, True), (0.0, 3.0, False), (0.5, 4.0, False)],
    ids=["management", "management after the ingress", "management too long", "and after the ingress"],
)
def test_management_has_its_time_once_the_ingress_is_there(
    another: Served,
    service: Management,
    management: grpc.Channel,
    monkeypatch: pytest.MonkeyPatch,
    ingress_away_seconds: float,
    away_seconds: float,
    is_found: bool,
) -> None:
    """Where all are started again, management may come last."""
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, script_away=1.0))
    created = management_pb2.CreateJobResponse(job=JOB, coordinator="behind-the-ingress:1", token=TOKEN)
    # It takes every session, whatever coordinator is named.
    link = CoordinatorLink(
        created, another.address, management_pb2_grpc.ManagementStub(management), may_be_replaced=True
    )
    try:
        service.begin = time.monotonic()
        service.ingress_away_seconds, service.away_seconds = ingress_away_seconds, away_seconds
        assert link.replace(Broken.__new__(Broken)) is is_found
        assert link.current.incarnation == is_found
    finally:
        link.close()
        link.close_channel()
