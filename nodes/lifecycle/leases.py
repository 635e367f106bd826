"""Which coordinator may attach to a node: the one whose job management gave the node to last, and no other."""

import logging
import threading
from collections.abc import Callable

import grpc

from interconnect.security.guard import caller_of
from interconnect.security.tokens import Kind

logger = logging.getLogger(__name__)


class Leases:
    """What a node knows of the leases of itself. Thread-safe."""

    def __init__(self, instance: Callable[[], str]) -> None:
        """instance: of the node, as of its last registration."""
        self._instance = instance
        self._lock = threading.Lock()
        self._last = 0  # the number of the latest lease that was shown

    def job_of(self, context: grpc.ServicerContext) -> str:
        """The job whose coordinator calls. Aborts the call where its lease is not, or no more, one of this node."""
        caller = caller_of(context.invocation_metadata())
        if caller is None or caller.kind is not Kind.LEASE:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no lease of this node was shown")
        job, instance, number = caller.names
        with self._lock:
            is_valid = instance == self._instance() and int(number) >= self._last
            if is_valid:
                self._last = int(number)
        if not is_valid:
            logger.warning("%s has no lease of this node: %s is not %s, or is over", job, instance, self._instance())
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "the lease is of another node, or is over")
        return job
