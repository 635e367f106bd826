"""The nodes of the cluster: who is there, until when, and for which job.

A node is there while its Register stream is open and its heartbeats come. Jobs lease nodes; a node that is lost while
it is leased is reported to its job.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from interconnect.swarmx_tree import tree_size
from wsc.v1 import management_pb2, node_pb2

PACKAGES = {
    node_pb2.ROLE_WAFER: "wafer",
    node_pb2.ROLE_WORKER: "workers",
    node_pb2.ROLE_MEMORYX: "memoryx",
    node_pb2.ROLE_SWARMX: "swarmx",
}
NOUNS = {
    node_pb2.ROLE_WAFER: "wafer",
    node_pb2.ROLE_WORKER: "input worker",
    node_pb2.ROLE_MEMORYX: "MemoryX node",
    node_pb2.ROLE_SWARMX: "SwarmX node",
}


@dataclass(slots=True, kw_only=True)
class _Node:
    info: management_pb2.NodeInfo  # without the lease's seconds, which change
    expires: float


class NodeRegistry:
    """Thread-safe."""

    def __init__(self, lease_seconds: float, on_lost: Callable[[management_pb2.NodeInfo, str], None]) -> None:
        """on_lost(node, reason) is called, outside of any lock, when a node that a job leases is lost."""
        self.address = "HOST:PORT"  # of the management service, for messages
        self._lease_seconds = lease_seconds
        self._on_lost = on_lost
        self._nodes: dict[str, _Node] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    def add(self, hello: management_pb2.RegisterRequest) -> str:
        """Returns the id of the node."""
        with self._changed:
            node_id = f"n{next(self._numbers)}"
            info = management_pb2.NodeInfo(
                node_id=node_id,
                role=hello.role,
                address=hello.address,
                host=hello.host,
                process_id=hello.process_id,
                version=hello.version,
            )
            self._nodes[node_id] = _Node(info=info, expires=time.monotonic() + self._lease_seconds)
            self._changed.notify_all()
        return node_id

    def renew(self, node_id: str) -> bool:
        """A heartbeat. False if the node has been given up already: it must register anew."""
        with self._changed:
            node = self._nodes.get(node_id)
            if node is not None:
                node.expires = time.monotonic() + self._lease_seconds
            return node is not None

    def remove(self, node_id: str, reason: str) -> None:
        """The node is gone; no effect if that is known."""
        with self._changed:
            node = self._nodes.pop(node_id, None)
            self._changed.notify_all()
        if node is not None and node.info.job:
            self._on_lost(node.info, reason)

    def expire(self) -> list[str]:
        """Remove the nodes whose lease has ended; returns their ids."""
        now = time.monotonic()
        with self._changed:
            expired = [node_id for node_id, node in self._nodes.items() if node.expires <= now]
        for node_id in expired:
            self.remove(node_id, f"it has said nothing for {self._lease_seconds:g} s")
        return expired

    def nodes(self, at_least: int = 0, wait_seconds: float = 0.0) -> Sequence[management_pb2.NodeInfo]:
        """All nodes, in the order in which they came; waits a while until there are enough."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._nodes) >= at_least, wait_seconds)
            now = time.monotonic()
            return [_with_lease(node, now) for node in self._nodes.values()]

    def acquire(
        self, job: str, wanted: management_pb2.Acquire, deadline: float, given_up: threading.Event
    ) -> management_pb2.Acquired:
        """Lease nodes to a job, together or not at all; waits for them until the deadline (monotonic) or given_up.

        Wafers and workers as asked for; MemoryX: all that are free, max_shards at most (0: no limit); SwarmX: enough
        for a tree, or one.
        """
        with self._changed:
            while True:
                # Who has given up gets none: their release may be over, and would not come again.
                chosen = None if given_up.is_set() else self._choose(wanted)
                if chosen is not None:
                    for node in chosen:
                        node.info.job = job
                    now = time.monotonic()
                    return management_pb2.Acquired(nodes=[_with_lease(node, now) for node in chosen])
                left = deadline - time.monotonic()
                if left <= 0 or given_up.is_set():
                    return management_pb2.Acquired(refusal=self._refusal(wanted))
                self._changed.wait(left)

    def release(self, job: str) -> None:
        """Give back all nodes of a job."""
        with self._changed:
            for node in self._nodes.values():
                if node.info.job == job:
                    node.info.job = ""
            self._changed.notify_all()

    def wake(self) -> None:
        """Have every acquire look at its given_up."""
        with self._changed:
            self._changed.notify_all()

    def _free(self, role: "node_pb2.Role.ValueType") -> list[_Node]:
        return [node for node in self._nodes.values() if node.info.role == role and not node.info.job]

    def _choose(self, wanted: management_pb2.Acquire) -> list[_Node] | None:
        chosen: list[_Node] = []
        for role, count in _needs(wanted):
            free = self._free(role)
            if len(free) < count:
                return None
            if role == node_pb2.ROLE_MEMORYX:
                count = min(len(free), wanted.max_shards) if wanted.max_shards else len(free)
            elif role == node_pb2.ROLE_SWARMX and len(free) >= tree_size(wanted.num_wafers):
                count = tree_size(wanted.num_wafers)
            chosen += free[:count]
        return chosen

    def _refusal(self, wanted: management_pb2.Acquire) -> str:
        problems = []
        for role, count in _needs(wanted):
            free = len(self._free(role))
            if free >= count:
                continue
            busy = [node.info.job for node in self._nodes.values() if node.info.role == role and node.info.job]
            problem = f"the job needs {_count(count, role)}, and {free or 'none'} {'is' if free <= 1 else 'are'} free"
            if busy:
                problem += f" ({_count(len(busy), role)} work{'s' if len(busy) == 1 else ''} for {_names(busy)})"
            missing = count - free - len(busy)
            if missing > 0:
                each = "one" if missing == 1 else f"{missing}, each"
                problem += f"; to add {each}: python -m {PACKAGES[role]} --management {self.address}"
            problems.append(problem)
        return "; ".join(problems)


def _needs(wanted: management_pb2.Acquire) -> Iterable[tuple["node_pb2.Role.ValueType", int]]:
    """The least number of each role."""
    yield node_pb2.ROLE_WAFER, wanted.num_wafers
    yield node_pb2.ROLE_WORKER, wanted.num_wafers * wanted.num_workers_per_wafer
    yield node_pb2.ROLE_MEMORYX, 1
    yield node_pb2.ROLE_SWARMX, 1


def _count(count: int, role: "node_pb2.Role.ValueType") -> str:
    return f"{count} {NOUNS[role]}{'' if count == 1 else 's'}"


def _names(jobs: Iterable[str]) -> str:
    return ", ".join(sorted(set(jobs)))


def _with_lease(node: _Node, now: float) -> management_pb2.NodeInfo:
    info = management_pb2.NodeInfo()
    info.CopyFrom(node.info)
    info.lease_left_seconds = max(0.0, node.expires - now)
    return info
