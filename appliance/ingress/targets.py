"""Where the calls of clients may go: to the coordinators and MemoryX nodes that the management service names.

What it has named stays open while it is away, and for a while after it is back, until those have come back to it too.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc

from interconnect.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

ANSWER_SECONDS: Final = 2.0
FRESH_SECONDS: Final = 2.0  # how long an answer counts
RETURN_SECONDS: Final = 10.0  # how long a target that management has not named any more stays open

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Target:
    channel: grpc.Channel
    calls: int = 0  # under way
    missing_since: float | None = None  # monotonic


class Targets:
    """Owns a channel to each target. Thread-safe."""

    def __init__(self, management: grpc.Channel) -> None:
        self._management = management_pb2_grpc.ManagementStub(management)
        self._lock = threading.Lock()
        self._targets: dict[str, _Target] = {}
        self._asked = -FRESH_SECONDS

    @contextlib.contextmanager
    def channel(self, address: str) -> Iterator[grpc.Channel | None]:
        """The channel to an address, for one call; None where no client has any business."""
        with self._lock:
            if address not in self._targets or time.monotonic() - self._asked >= FRESH_SECONDS:
                self._ask()
            target = self._targets.get(address)
            if target is not None:
                target.calls += 1
        if target is None:
            yield None
            return
        try:
            yield target.channel
        finally:
            with self._lock:
                target.calls -= 1
                if not target.calls and self._targets.get(address) is not target:
                    target.channel.close()

    def close(self) -> None:
        """End all calls."""
        with self._lock:
            for target in self._targets.values():
                target.channel.close()

    def _ask(self) -> None:
        """Learn from management what there is; if it does not answer, what was known counts."""
        try:
            jobs = self._management.ListJobs(management_pb2.ListJobsRequest(), timeout=ANSWER_SECONDS).jobs
            nodes = self._management.ListNodes(management_pb2.ListNodesRequest(), timeout=ANSWER_SECONDS).nodes
        except grpc.RpcError as error:
            logger.debug("management names no targets: %s", error)
            return
        finally:
            self._asked = time.monotonic()
        named = {job.coordinator for job in jobs if job.coordinator}
        named |= {node.address for node in nodes if node.role == node_pb2.ROLE_MEMORYX}
        for address in named - self._targets.keys():
            self._targets[address] = _Target(channel=make_channel(address))
        for address, target in list(self._targets.items()):
            if address in named:
                target.missing_since = None
            elif target.missing_since is None:
                target.missing_since = self._asked
            elif self._asked - target.missing_since >= RETURN_SECONDS:
                del self._targets[address]
                if not target.calls:
                    target.channel.close()
