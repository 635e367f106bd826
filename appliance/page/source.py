"""What the page shows comes from here: the management service, asked over its own port like everybody asks it."""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol, Self

import grpc

from nodes.lifecycle.role_names import role_name
from wsc.v1 import management_pb2, management_pb2_grpc, observation_pb2, observation_pb2_grpc

CALL_SECONDS = 5.0


class SourceAway(RuntimeError):
    """The management service does not answer: it is about to end."""


class PageSource(Protocol):
    """Every method raises SourceAway."""

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        """All nodes of the cluster."""

    async def targets(self) -> Sequence[tuple[str, str]]:
        """The processes that serve figures for Prometheus: role, and host:port."""

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        """Those under way and the last that ended, newest first."""

    async def job(self, name: str) -> management_pb2.JobInfo | None:
        """One of them, or None."""

    def events(self, name: str) -> AsyncIterator[observation_pb2.JobEvents]:
        """What is kept of a job, oldest first, then what happens, until it has ended."""


class ManagementSource:
    """A management service at an address. To be used as an async context manager."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def __aenter__(self) -> Self:
        # An environment's HTTP proxy has no business here.
        self._channel = grpc.aio.insecure_channel(self._address, options=[("grpc.enable_http_proxy", 0)])
        self._management = management_pb2_grpc.ManagementStub(self._channel)
        self._observation = observation_pb2_grpc.ObservationStub(self._channel)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._channel.close(None)

    async def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        return (await self._cluster()).nodes

    async def targets(self) -> Sequence[tuple[str, str]]:
        cluster = await self._cluster()
        nodes = [(role_name(node.role), node.metrics) for node in cluster.nodes]
        return [(role, metrics) for role, metrics in [("management", cluster.metrics), *nodes] if metrics]

    async def _cluster(self) -> management_pb2.ListNodesResponse:
        try:
            return await self._management.ListNodes(management_pb2.ListNodesRequest(), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _away(error) from error

    async def jobs(self) -> Sequence[management_pb2.JobInfo]:
        try:
            answer = await self._management.ListJobs(management_pb2.ListJobsRequest(), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _away(error) from error
        return answer.jobs

    async def job(self, name: str) -> management_pb2.JobInfo | None:
        try:
            answer = await self._management.GetJob(management_pb2.GetJobRequest(job=name), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return None
            raise _away(error) from error
        return answer.job

    async def events(self, name: str) -> AsyncIterator[observation_pb2.JobEvents]:
        watching = self._observation.WatchJob(observation_pb2.WatchJobRequest(job=name, follow=True))
        try:
            async for events in watching:
                yield events
        except grpc.aio.AioRpcError as error:
            # A service that keeps no events has none to show; a job that is not known has not either.
            if error.code() not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                raise _away(error) from error
        finally:
            watching.cancel()


def _away(error: grpc.aio.AioRpcError) -> SourceAway:
    return SourceAway(f"the management service does not answer: {error.details()}")
