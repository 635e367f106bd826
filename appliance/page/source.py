"""The data that the page shows, from a management service: of the same process, or of any other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol, TypeVar

import grpc

from appliance.job_history import KINDS, TooSlow, batches
from appliance.management.service import ManagementService
from waferbox import deadlines, roles
from waferbox.rpc.async_server import AsyncServer, make_async_channel
from waferbox.security.guard import bearer
from wsc.v1 import management_pb2, management_pb2_grpc, observation_pb2, observation_pb2_grpc

SECONDS: Final = deadlines.QUERIES.command  # for the answer to a call

_Read = TypeVar("_Read")


class PageSource(Protocol):
    """The data of a cluster that the page shows. Called in the page's event loop."""

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        """All nodes of the cluster."""

    async def targets(self) -> Sequence[tuple[str, str]]:
        """The processes that serve metrics for Prometheus: role, and host:port."""

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        """The live jobs and the last that ended, newest first."""

    async def job(self, name: str) -> management_pb2.JobInfo | None:
        """One of these jobs; None if there is none of this name."""

    def events(self, name: str) -> AsyncIterator[observation_pb2.JobEvents]:
        """The stored events of a job, oldest first, then new ones until it has ended. Raises TooSlow."""


class ServiceSource:
    """The management service of this process. A viewer costs it no gRPC call, no stream and no thread."""

    def __init__(self, service: ManagementService, server: AsyncServer) -> None:
        """server: runs the event loop that owns the service."""
        self._service = service
        self._server = server

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        return await self._read(self._service.nodes)

    async def targets(self) -> Sequence[tuple[str, str]]:
        return _targets(self._service.metrics, await self.nodes())

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        return await self._read(lambda: self._service.describe(self._service.jobs()))

    async def job(self, name: str) -> management_pb2.JobInfo | None:
        return await self._read(lambda: self._service.describe_one(name))

    async def events(self, name: str) -> AsyncIterator[observation_pb2.JobEvents]:
        history = await self._read(lambda: self._service.history(name))
        if history is None:
            return
        watcher = history.watch(KINDS)
        try:
            async for batch in watcher.batches():
                for events in batches(batch):
                    yield events
        finally:
            history.unwatch(watcher)

    async def _read(self, read: Callable[[], _Read]) -> _Read:
        """Calls a function in the service's event loop."""

        async def call() -> _Read:
            return read()

        return await asyncio.wrap_future(self._server.loop.submit(call()))


class RemoteSource:
    """The PageSource of a cluster that is reached by gRPC. Used in the page's event loop.

    While management does not answer, the page shows what is known.
    """

    def __init__(self, address: str, token: str) -> None:
        """Makes the source; it connects with the first call.

        Args:
            address: of the management service.
            token: that calls bear; empty: none.
        """
        self._address = address
        self._metadata = (bearer(token),) if token else ()
        self._channel: grpc.aio.Channel | None = None
        self._nodes = management_pb2.ListNodesResponse()
        self._jobs: Sequence[management_pb2.JobInfo] = ()

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        request = management_pb2.ListNodesRequest()
        with contextlib.suppress(grpc.aio.AioRpcError):
            self._nodes = await self._management().ListNodes(request, timeout=SECONDS, metadata=self._metadata)
        return self._nodes.nodes

    async def targets(self) -> Sequence[tuple[str, str]]:
        nodes = await self.nodes()
        return _targets(self._nodes.metrics, nodes)

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        request = management_pb2.ListJobsRequest()
        with contextlib.suppress(grpc.aio.AioRpcError):
            self._jobs = (await self._management().ListJobs(request, timeout=SECONDS, metadata=self._metadata)).jobs
        return self._jobs

    async def job(self, name: str) -> management_pb2.JobInfo | None:
        request = management_pb2.GetJobRequest(job=name)
        try:
            return (await self._management().GetJob(request, timeout=SECONDS, metadata=self._metadata)).job
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return None
            return next((job for job in self._jobs if job.job == name), None)

    async def events(self, name: str) -> AsyncIterator[observation_pb2.JobEvents]:
        request = observation_pb2.WatchJobRequest(job=name, follow=True, kinds=KINDS)
        try:
            observation = observation_pb2_grpc.ObservationStub(self._connected())
            async for events in observation.WatchJob(request, metadata=self._metadata):
                yield events
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:
                raise TooSlow from error  # the browser asks again, and gets all stored events

    def _management(self) -> "management_pb2_grpc.ManagementAsyncStub":
        return management_pb2_grpc.ManagementStub(self._connected())

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:  # a channel belongs to the event loop in which it is made
            self._channel = make_async_channel(self._address)
        return self._channel


def _targets(management: str, nodes: Sequence[management_pb2.NodeInfo]) -> Sequence[tuple[str, str]]:
    """Returns the processes that serve metrics. management: where that service does; empty: nowhere."""
    of_nodes = [(roles.role_of(node.role).name, node.metrics) for node in nodes]
    return [(role, metrics) for role, metrics in [(roles.MANAGEMENT.name, management), *of_nodes] if metrics]
