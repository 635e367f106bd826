"""What the page shows comes from here: the management service, which runs in the same process."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from appliance.job_history import KINDS, batches
from appliance.management.service import ManagementService
from waferbox import roles
from wsc.v1 import management_pb2, observation_pb2


class PageSource(Protocol):
    """What there is to be seen of a cluster."""

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        """All nodes of the cluster."""

    async def targets(self) -> Sequence[tuple[str, str]]:
        """The processes that serve figures for Prometheus: role, and host:port."""

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        """Those under way and the last that ended, newest first."""

    async def job(self, name: str) -> management_pb2.JobInfo | None:
        """One of them, or None."""

    def events(self, name: str) -> AsyncIterator[observation_pb2.JobEvents]:
        """What is kept of a job, oldest first, then what happens, until it has ended. Raises TooSlow."""


class ServiceSource:
    """A management service in this process: a viewer costs it no call, no stream and no thread."""

    def __init__(self, service: ManagementService) -> None:
        self._service = service

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        return self._service.nodes()

    async def targets(self) -> Sequence[tuple[str, str]]:
        nodes = [(roles.role_of(node.role).name, node.metrics) for node in self._service.nodes()]
        return [
            (role, metrics) for role, metrics in [(roles.MANAGEMENT.name, self._service.metrics), *nodes] if metrics
        ]

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        return self._service.describe(self._service.jobs())

    async def job(self, name: str) -> management_pb2.JobInfo | None:
        return self._service.describe_one(name)

    async def events(self, name: str) -> AsyncIterator[observation_pb2.JobEvents]:
        history = self._service.history(name)
        if history is None:
            return
        watcher = history.watch(KINDS)
        try:
            async for batch in watcher.batches():
                for events in batches(batch):
                    yield events
        finally:
            history.unwatch(watcher)
