"""A script's session with the coordinators that take its job over, on a simulated network."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import pytest
from network import Channel, Context, Network, Server
from virtual_time import Process, World

from cstorch._internal.session.job_session import JobSession
from cstorch.errors import ClusterError
from waferbox import deadlines
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, management_pb2_grpc

SECONDS = 60.0


@dataclass
class Management(management_pb2_grpc.ManagementServicer):
    """Names the present coordinator of the job."""

    coordinator: str

    async def GetJob(  # type: ignore[override]  # another context
        self, request: management_pb2.GetJobRequest, context: Context
    ) -> management_pb2.GetJobResponse:
        return management_pb2.GetJobResponse(job=management_pb2.JobInfo(coordinator=self.coordinator))


@dataclass
class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Has at most one session, which it believes in until it is reported to be cut off."""

    on_open: Callable[[], None] = lambda: None
    on_cut_off: Callable[[], None] = lambda: None
    refusal: grpc.StatusCode | None = None
    requests: list[coordinator_pb2.SessionRequest] = field(default_factory=list)

    async def Session(  # type: ignore[override]
        self, request: coordinator_pb2.SessionRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        self.requests.append(request)
        if request.cut_off:
            self.on_cut_off()
        if self.refusal is not None:
            await context.abort(self.refusal, "no such job")
        if len(self.requests) > 1:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "the job has a session")
        self.on_open()
        yield coordinator_pb2.SessionResponse(opened=coordinator_pb2.SessionOpened())
        yield coordinator_pb2.SessionResponse(ready=coordinator_pb2.JobReady())
        await asyncio.get_running_loop().create_future()


class Rig:
    """A management service, coordinators at first:1, second:1 and third:1, and a script that opens its session."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.management = Management(coordinator="first:1")  # type: ignore[abstract]
        addresses = ("first:1", "second:1", "third:1")
        self.coordinators = {address: Coordinator() for address in addresses}  # type: ignore[abstract]
        self.processes: dict[str, Process] = {}
        management_pb2_grpc.add_ManagementServicer_to_server(self.management, self._server("management:1"))
        for address, coordinator in self.coordinators.items():
            coordinator_pb2_grpc.add_CoordinatorServicer_to_server(coordinator, self._server(address))
        self.client = Process(self.world, "client")
        self.session: JobSession
        self.client.start(self._open)

    def _server(self, address: str) -> grpc.Server:
        self.processes[address] = Process(self.world, address.removesuffix(":1"))
        return Server(self.network, self.processes[address], address)  # type: ignore[return-value]

    async def _open(self) -> int:
        channel = Channel(self.network, self.client, "management:1")
        self.session = JobSession(
            management_pb2.CreateJobResponse(job="job", coordinator="first:1", token="token"),
            management_pb2_grpc.ManagementStub(channel),  # type: ignore[call-overload]
            self._connect,
            gateway="",
            may_be_replaced=True,
            has_cluster_ended=lambda: False,
        )
        await self.session.open()
        await self.session.until_ready()
        self.world.after(1.0, self.replace, "first:1", "second:1")
        await asyncio.get_running_loop().create_future()
        return 0

    async def _connect(self, address: str, what: str, token: str) -> grpc.aio.Channel:
        channel = Channel(self.network, self.client, address)
        await channel.connect(waits=True)
        return channel  # type: ignore[return-value]

    def replace(self, dead: str, successor: str) -> None:
        self.management.coordinator = successor
        self.processes[dead].kill()

    def break_connection(self, address: str) -> None:
        """Breaks the connection of the script to a server, which does not notice it."""
        for connection in list(self.network.connections):
            if connection.server.address == address:
                connection.handled.clear()
                connection.break_()

    def run(self, until: Callable[[], object]) -> None:
        assert self.world.run(SECONDS, until)
        assert not self.world.defects
        self.world.close()


@pytest.mark.parametrize("seed", range(20))
def test_a_connection_that_breaks_while_its_session_is_opened_is_reported(seed: int) -> None:
    rig = Rig(seed)
    second, third = rig.coordinators["second:1"], rig.coordinators["third:1"]
    second.on_open = lambda: rig.break_connection("second:1")
    second.on_cut_off = lambda: rig.replace("second:1", "third:1")
    rig.run(lambda: third.requests and rig.session.connection.coordinator == "third:1")
    assert rig.session.alive
    assert rig.session.failure is None
    assert [request.cut_off for request in second.requests] == [False, False, True]


@pytest.mark.parametrize("seed", range(5))
def test_a_successor_that_refuses_the_session_ends_the_job_with_its_reason(seed: int) -> None:
    rig = Rig(seed)
    rig.coordinators["second:1"].refusal = grpc.StatusCode.NOT_FOUND
    rig.run(lambda: hasattr(rig, "session") and rig.session.failure is not None)
    assert isinstance(rig.session.failure, ClusterError)
    assert str(rig.session.failure) == "no such job"
    assert rig.world.now < deadlines.COORDINATION.another
