"""The data that the page shows, from the management service of the same process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, TypeVar

from appliance.job_history import KINDS, batches
from appliance.management.service import ManagementService
from waferbox import roles
from waferbox.rpc.async_server import AsyncServer
from wsc.v1 import management_pb2, observation_pb2

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
        nodes = [(roles.role_of(node.role).name, node.metrics) for node in await self.nodes()]
        return [
            (role, metrics) for role, metrics in [(roles.MANAGEMENT.name, self._service.metrics), *nodes] if metrics
        ]

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
