"""The nodes of the cluster: who is there, until when, and for which job; and the jobs that wait for some.

A node is there while its Register stream is open and its heartbeats come. Jobs lease nodes; a node that is lost while
it is leased is reported to its job. After a start of management nodes may come that work for jobs which are not back
yet: these are kept for them for a while.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.management.allocation import Inventory, refusal
from appliance.management.changes import Changes
from appliance.management.job_queue import JobQueue, Waiting
from wsc.v1 import management_pb2, node_pb2

MISSING_NODES_SECONDS = 5.0  # how long a job waits for nodes that the cluster does not have
RETURN_SECONDS = 10.0  # after a start: how long nodes are kept for jobs that are not back
MAX_NODES = 16_384


class RegistryFull(RuntimeError):
    """There are as many nodes as a cluster may have."""


class Waiter(Protocol):
    """A job in the queue. Called under the registry's lock: must not block, nor call the registry."""

    def queued(self, status: management_pb2.QueueStatus) -> None:
        """It waits at this position; at position 0 it has stopped waiting."""

    def admitted(self, nodes: Sequence[management_pb2.NodeInfo]) -> None:
        """It has these nodes."""

    def refused(self, refusal: str) -> None:
        """It will not get what it needs, because the cluster does not have it."""


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
        self.changes = Changes()  # of what nodes() and ingress() return
        self._lock = threading.Lock()
        self._jobs: set[str] = set()  # that may hold nodes
        self._returning_until = time.monotonic() + RETURN_SECONDS
        self._queue = JobQueue()
        self._waiters: dict[str, Waiter] = {}
        self._told: dict[str, management_pb2.QueueStatus] = {}  # what each waiter was told last
        self._impossible_since: dict[str, float] = {}

    # --- nodes --------------------------------------------------------------------------------------------------------

    def add(self, hello: management_pb2.RegisterRequest) -> str:
        """Returns the id of the node. Raises RegistryFull."""
        with self._lock:
            if len(self._nodes) >= MAX_NODES:
                raise RegistryFull(f"the cluster has {MAX_NODES} nodes, which is as many as it may have")
            node_id = f"n{next(self._numbers)}"
            info = management_pb2.NodeInfo(
                node_id=node_id,
                role=hello.role,
                address=hello.address,
                host=hello.host,
                process_id=hello.process_id,
                version=hello.version,
                metrics=hello.metrics,
                instance=hello.instance,
            )
            now = time.monotonic()
            if hello.job in self._jobs or now < self._returning_until:
                info.job, info.member = hello.job, hello.member
            self._nodes[node_id] = _Node(info=info, expires=now + self._lease_seconds)
            self._admit()
        return node_id

    def renew(self, node_id: str) -> bool:
        """A heartbeat. False if the node has been given up already: it must register anew."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is not None:
                node.expires = time.monotonic() + self._lease_seconds
            return node is not None

    def remove(self, node_id: str, reason: str) -> None:
        """The node is gone; no effect if that is known."""
        with self._lock:
            node = self._nodes.pop(node_id, None)
            self._admit()
        if node is not None and node.info.job:
            self._on_lost(node.info, reason)

    def count(self) -> int:
        """How many nodes there are."""
        return len(self._nodes)

    def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        """All nodes, in the order in which they came."""
        with self._lock:
            now = time.monotonic()
            return [_with_lease(node, now) for node in self._nodes.values()]

    def ingress(self) -> str:
        """The address of one; empty if there is none."""
        with self._lock:
            return next((node.address for node in self._infos() if node.role == node_pb2.ROLE_INGRESS), "")

    def held(self, job: str) -> Sequence[management_pb2.NodeInfo]:
        """The nodes that a job leases."""
        with self._lock:
            return self._held(job)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def open(self, job: str) -> None:
        """The job may hold nodes from now on; also those that were kept for it."""
        with self._lock:
            self._jobs.add(job)

    def release(self, job: str) -> None:
        """The job has ended: it waits no more, and gives back all nodes."""
        with self._lock:
            self._jobs.discard(job)
            self._forget(job)
            self._free(lambda holder: holder == job)
            self._admit()

    def enqueue(self, waiting: Waiting, waiter: Waiter) -> None:
        """Have a job wait for nodes. One that has them already, and asks again, gets those."""
        with self._lock:
            if waiting.job not in self._jobs:
                return
            held = self._held(waiting.job)
            if held:
                waiter.admitted(held)
                return
            self._queue.put(waiting)
            self._waiters[waiting.job] = waiter
            self._admit()

    def leave(self, job: str, waiter: Waiter) -> None:
        """The job waits no more, unless it does so with another waiter by now."""
        with self._lock:
            if self._waiters.get(job) is waiter:
                self._forget(job)
                self._admit()

    def set_priority(self, job: str, priority: int) -> None:
        """The job may move in the queue."""
        with self._lock:
            self._queue.set_priority(job, priority)
            self._admit()

    def queue_status(self) -> Mapping[str, management_pb2.QueueStatus]:
        """Where each job is in the queue."""
        with self._lock:
            return self._queue.status(self._infos())

    # --- the passage of time ------------------------------------------------------------------------------------------

    def expire(self) -> list[str]:
        """Remove the nodes whose lease has ended; returns their ids."""
        now = time.monotonic()
        with self._lock:
            expired = [node_id for node_id, node in self._nodes.items() if node.expires <= now]
        for node_id in expired:
            self.remove(node_id, f"it has said nothing for {self._lease_seconds:g} s")
        return expired

    def review(self) -> None:
        """Tell waiting jobs what has changed, refuse what stays impossible, end the time for jobs to return."""
        now = time.monotonic()
        with self._lock:
            if now >= self._returning_until:
                self._free(lambda holder: holder not in self._jobs)
            self._admit()
            since = self._impossible_since
            self._impossible_since = {
                waiting.job: since.get(waiting.job, now) for waiting in self._queue.impossible(self._infos())
            }
            for waiting in self._queue.ordered():
                impossible_since = self._impossible_since.get(waiting.job)
                if impossible_since is not None and now - impossible_since >= MISSING_NODES_SECONDS:
                    inventory = Inventory(self._infos())
                    self._waiters[waiting.job].refused(refusal(waiting.wanted, inventory, self.address))
                    self._forget(waiting.job)
            for job, status in self._queue.status(self._infos()).items():
                if status != self._told.get(job):
                    self._told[job] = status
                    self._waiters[job].queued(status)

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _infos(self) -> Sequence[management_pb2.NodeInfo]:
        return [node.info for node in self._nodes.values()]

    def _held(self, job: str) -> Sequence[management_pb2.NodeInfo]:
        now = time.monotonic()
        return [_with_lease(node, now) for node in self._nodes.values() if node.info.job == job]

    def _admit(self) -> None:
        """Something has changed: give nodes to the jobs whose turn it is."""
        now = time.monotonic()
        for admission in self._queue.admit(self._infos()):
            waiter = self._waiters[admission.job]
            if admission.job in self._told:
                waiter.queued(management_pb2.QueueStatus())
            self._forget(admission.job)
            waiter.admitted([_with_lease(self._nodes[node.node_id], now) for node in admission.nodes])
        self.changes.notify()

    def _forget(self, job: str) -> None:
        self._queue.remove(job)
        for table in (self._waiters, self._told, self._impossible_since):
            table.pop(job, None)

    def _free(self, is_over: Callable[[str], bool]) -> None:
        for node in self._nodes.values():
            if node.info.job and is_over(node.info.job):
                node.info.job = node.info.member = ""


def _with_lease(node: _Node, now: float) -> management_pb2.NodeInfo:
    info = management_pb2.NodeInfo()
    info.CopyFrom(node.info)
    info.lease_left_seconds = max(0.0, node.expires - now)
    return info
