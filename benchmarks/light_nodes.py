"""Nodes and coordinators that are only streams of one event loop: thousands of them in one process, without torch."""

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc

from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind, cluster_secret
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import (
    ingress_pb2,
    ingress_pb2_grpc,
    management_pb2,
    management_pb2_grpc,
    node_pb2,
)

AT_ONCE: Final = 100  # streams that are being opened
HEARTBEATS_PER_LEASE: Final = 4
RETRY_SECONDS: Final = 0.01

_OPTIONS: Final = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


class LightNodes:
    """Registered nodes that send heartbeats and do nothing. To be used as an async context manager."""

    def __init__(self, management: str, connections: int) -> None:
        """connections: how many the nodes share."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._channels = [grpc.aio.insecure_channel(management, options=_OPTIONS) for _ in range(connections)]
        self._calls: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "LightNodes":
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    async def register(self, role: "node_pb2.Role.ValueType", count: int, address: str = "") -> None:
        """Add nodes of a role, and keep them alive. address: of a single one; otherwise each has its own."""
        limit = asyncio.Semaphore(AT_ONCE)

        async def register_one(number: int) -> None:
            async with limit:
                channel = self._channels[number % len(self._channels)]
                call = _stub(channel).Register(metadata=_shown(Kind.NODE))
                hello = management_pb2.RegisterRequest(role=role, host="here", version=WIRE_VERSION)
                hello.address = address or f"127.0.0.1:{number + 1}"
                await call.write(hello)
                lease_seconds = (await call.read()).lease_seconds
            self._calls.append(call)
            self._tasks.append(asyncio.create_task(_beat(call, lease_seconds / HEARTBEATS_PER_LEASE)))

        first = len(self._calls)
        await asyncio.gather(*(register_one(number) for number in range(first, first + count)))

    def broken(self) -> int:
        """How many streams have ended."""
        return sum(call.done() for call in self._calls)

    async def kill(self) -> None:
        """The last one to register is gone."""
        self._tasks.pop().cancel()
        self._calls.pop().cancel()


def _shown(kind: Kind, *names: str) -> tuple[tuple[str, str], ...]:
    """Metadata that shows a token."""
    return (bearer(cluster_secret().token(kind, *names)),)


async def _beat(call: Any, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        await call.write(management_pb2.RegisterRequest())


def _stub(channel: grpc.aio.Channel) -> Any:
    """Of management; the types that are generated are those of calls without an event loop."""
    return management_pb2_grpc.ManagementStub(channel)


class LightCoordinators(ingress_pb2_grpc.IngressServicer):
    """An ingress whose coordinators are coroutines: they ask for nodes, hold them for a moment, and succeed."""

    def __init__(self, management: str, num_wafers: int, hold_seconds: float) -> None:
        self._channel = grpc.aio.insecure_channel(management, options=_OPTIONS)
        self._num_wafers = num_wafers
        self._hold_seconds = hold_seconds
        self._holders: set[str] = set()  # ids of nodes that are leased
        self.shared: list[str] = []  # ids of nodes that two jobs had at once

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The address at which it serves."""
        server = grpc.aio.server()
        ingress_pb2_grpc.add_IngressServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)
            await self._channel.close(None)

    async def RunCoordinator(
        self, request: ingress_pb2.RunCoordinatorRequest, context: Any
    ) -> ingress_pb2.RunCoordinatorResponse:
        call = _stub(self._channel).Coordinate(metadata=_shown(Kind.COORDINATOR, request.job))
        hello = management_pb2.CoordinatorHello(job=request.job, address="127.0.0.1:1", token=request.token)
        acquire = management_pb2.Acquire(num_wafers=self._num_wafers, num_workers_per_wafer=1)
        for message in (
            management_pb2.CoordinateRequest(hello=hello),
            management_pb2.CoordinateRequest(acquire=acquire),
        ):
            await call.write(message)
        nodes: Sequence[management_pb2.NodeInfo] = ()
        while not nodes:
            response = await call.read()
            ended = response is grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs
            assert not ended, f"the stream of {request.job} ended"
            nodes = response.acquired.nodes
        held = {node.node_id for node in nodes}
        self.shared += held & self._holders
        self._holders |= held
        await call.write(_report(management_pb2.JOB_PHASE_RUNNING))
        await asyncio.sleep(self._hold_seconds)
        self._holders -= held
        await call.write(_report(management_pb2.JOB_PHASE_SUCCEEDED))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
            pass
        return ingress_pb2.RunCoordinatorResponse(status=0)

    async def EndCoordinator(
        self, request: ingress_pb2.EndCoordinatorRequest, context: Any
    ) -> ingress_pb2.EndCoordinatorResponse:
        raise AssertionError("no job is cancelled here")


def _report(phase: "management_pb2.JobPhase.ValueType") -> management_pb2.CoordinateRequest:
    return management_pb2.CoordinateRequest(report=management_pb2.JobReport(phase=phase))


class LightClient:
    """What scripts and the command ask of management. To be used as an async context manager."""

    def __init__(self, management: str) -> None:
        self._channel = grpc.aio.insecure_channel(management, options=_OPTIONS)
        self.stub = management_pb2_grpc.ManagementStub(self._channel)

    async def __aenter__(self) -> "LightClient":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._channel.close(None)

    async def create_jobs(self, count: int, num_wafers: int) -> None:
        """Ask for so many at once; returns when each has its coordinator."""
        request = management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=num_wafers, num_workers_per_csx=1)
        await asyncio.gather(
            *(self.stub.CreateJob(request, wait_for_ready=True, metadata=_shown(Kind.ADMIN)) for _ in range(count))
        )

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        return (await self.stub.ListJobs(management_pb2.ListJobsRequest(), metadata=_shown(Kind.ADMIN))).jobs

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        return (await self.stub.ListNodes(management_pb2.ListNodesRequest(), metadata=_shown(Kind.ADMIN))).nodes

    async def until_nodes(self, count: int) -> float:
        """Wait until so many are there, no more; returns the seconds that it took."""
        begin = time.perf_counter()
        while len(await self.nodes()) > count:
            await asyncio.sleep(RETRY_SECONDS)
        return time.perf_counter() - begin
