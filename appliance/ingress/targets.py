"""The targets of clients' calls: the coordinators and the nodes with states that the management service lists.

A listed target stays open while management is away, and for a while after its restart, until the target has registered.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import grpc

from waferbox import deadlines
from waferbox.rpc.async_server import make_async_channel
from waferbox.security.guard import bearer
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

FRESH_SECONDS: Final = 2.0  # validity of an answer
RETURN_SECONDS: Final = 10.0  # a target stays open for so long after management no longer lists it
STATE_KEEPERS: Final = (node_pb2.ROLE_MEMORYX, node_pb2.ROLE_WAFER)  # a wafer in layer pipelined mode

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Target:
    channel: grpc.aio.Channel
    calls: int = 0  # in progress
    missing_since: float | None = None  # monotonic


class Targets:
    """A cache of targets with a channel to each. Used in one event loop."""

    def __init__(self, management: grpc.aio.Channel) -> None:
        self._management: management_pb2_grpc.ManagementAsyncStub = management_pb2_grpc.ManagementStub(management)
        self._query_lock = asyncio.Lock()
        self._targets: dict[str, _Target] = {}
        self._last_query = -FRESH_SECONDS

    @contextlib.asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel | None]:
        """Yields the channel to an address, for one call; None if clients must not call it."""
        called = time.monotonic()
        if self._is_stale(address):
            async with self._query_lock:
                if self._last_query < called:
                    await self._query()
        target = self._targets.get(address)
        if target is None:
            yield None
            return
        target.calls += 1
        try:
            yield target.channel
        finally:
            target.calls -= 1
            if not target.calls and self._targets.get(address) is not target:
                await target.channel.close(None)

    async def close(self) -> None:
        """Ends all calls."""
        await asyncio.gather(*(target.channel.close(None) for target in self._targets.values()))

    def _is_stale(self, address: str) -> bool:
        return address not in self._targets or time.monotonic() - self._last_query >= FRESH_SECONDS

    async def _query(self) -> None:
        """Queries management for the targets; without an answer the known ones stay."""
        self._last_query = time.monotonic()
        shown = (bearer(cluster_secret().token(Kind.NODE)),)
        try:
            seconds = deadlines.QUERIES.ingress
            answers = await asyncio.gather(
                self._management.ListJobs(management_pb2.ListJobsRequest(), timeout=seconds, metadata=shown),
                self._management.ListNodes(management_pb2.ListNodesRequest(), timeout=seconds, metadata=shown),
            )
        except grpc.RpcError as error:
            logger.debug("management lists no targets: %s", error)
            return
        named = {job.coordinator for job in answers[0].jobs if job.coordinator}
        named |= {node.address for node in answers[1].nodes if node.role in STATE_KEEPERS}
        for address in named - self._targets.keys():
            self._targets[address] = _Target(channel=make_async_channel(address))
        for address, target in list(self._targets.items()):
            if address in named:
                target.missing_since = None
            elif target.missing_since is None:
                target.missing_since = self._last_query
            elif self._last_query - target.missing_since >= RETURN_SECONDS:
                del self._targets[address]
                if not target.calls:
                    await target.channel.close(None)
