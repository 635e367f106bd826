"""The nodes of the cluster: who is there, until when, and for which job; and the jobs that wait for some.

A node is there while its Register stream is open and its heartbeats come. Jobs lease nodes; a node that is lost while
it is leased is reported to its job. One that its job has given up keeps the job's name, without being a member, until
it says that the job is not attached to it any more; then it is free. After a start of management nodes may come that
work for jobs which are not back yet: these are kept for them for a while.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.changes import Changes
from appliance.management.nodes.allocation import Inventory, refusal
from appliance.management.nodes.job_queue import JobQueue, Waiting
from appliance.management.nodes.replacements import MAX_REQUESTS, Replacement, Replacements
from waferbox import deadlines
from wsc.v1 import management_pb2, node_pb2

MAX_NODES = 16_384
MAX_PROBLEM = 500  # characters


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
        # That may hold nodes; with those, by member, that their coordinators know of.
        self._jobs: dict[str, Mapping[str, management_pb2.NodeInfo]] = {}
        self._returning_until = time.monotonic() + deadlines.REGISTRATION.return_to_job
        # Until then: the jobs and members, by address, that nodes are which have not returned yet, as far as is known.
        self._homes: dict[str, tuple[str, str]] = {}
        self._queue = JobQueue()
        self._replacements = Replacements()
        self._waiters: dict[str, Waiter] = {}
        self._returning: set[str] = set()  # those of them that have nodes already, which are to return
        self._last_statuses: dict[str, management_pb2.QueueStatus] = {}  # what each waiter was told last
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
            if hello.job and (hello.job in self._jobs or now < self._returning_until):
                self._homes.pop(hello.address, None)
                info.job, info.member = hello.job, hello.member if self._is_member(hello) else ""
            elif not hello.job:
                self._keep_returned(info)
            self._nodes[node_id] = _Node(info=info, expires=now + self._lease_seconds)
            self._admit()
        return node_id

    def renew(self, node_id: str, job: str) -> bool:
        """A heartbeat, with the job that is attached to the node. False if it came too late: it must register anew."""
        with self._lock:
            node = self._nodes.get(node_id)
            if node is not None:
                node.expires = time.monotonic() + self._lease_seconds
                if node.info.job and not node.info.member and not job:
                    node.info.job = ""  # given up, and now free of its job
                    self._admit()
            return node is not None

    def remove(self, node_id: str, reason: str) -> None:
        """The node is gone; no effect if that is known."""
        with self._lock:
            node = self._nodes.pop(node_id, None)
            is_missed = node is not None and self._is_missed(node.info)
            self._admit()
        if node is not None and is_missed:
            self._on_lost(node.info, reason)

    def count(self) -> int:
        """How many nodes there are."""
        return len(self._nodes)

    def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        """All nodes, in the order in which they came."""
        with self._lock:
            now = time.monotonic()
            return [_with_lease(node.info, node.expires - now) for node in self._nodes.values()]

    def ingress(self) -> str:
        """The address of one; empty if there is none."""
        with self._lock:
            return next((node.address for node in self._infos() if node.role == node_pb2.ROLE_INGRESS), "")

    def held(self, job: str) -> Sequence[management_pb2.NodeInfo]:
        """The nodes that a job leases."""
        with self._lock:
            return self._held(job)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def open(self, job: str, nodes: Sequence[management_pb2.NodeInfo] = ()) -> None:
        """The job may hold nodes from now on; also those that were kept for it.

        nodes: that its coordinator knows of, from an earlier start of management.
        """
        with self._lock:
            known = self._jobs[job] = {node.member: node for node in nodes}
            if time.monotonic() < self._returning_until:
                self._homes.update((node.address, (job, node.member)) for node in nodes)
            for node in self._nodes.values():
                if node.info.job:
                    self._homes.pop(node.info.address, None)
                else:
                    self._keep_returned(node.info)
                if node.info.job == job and known and not _is_same(known.get(node.info.member), node.info):
                    node.info.member = ""

    def release(self, job: str) -> None:
        """The job has ended: it waits no more, and gives back all nodes."""
        with self._lock:
            self._jobs.pop(job, None)
            self._forget(job)
            self._free(lambda holder: holder == job)
            self._admit()

    def enqueue(self, waiting: Waiting, waiter: Waiter) -> None:
        """Have a job wait for nodes. One that has them already, and asks again, gets those, dead ones too.

        After a start of management it gets them when they have returned: only then do they take a lease of ours.
        """
        with self._lock:
            if waiting.job not in self._jobs:
                return
            if self._jobs[waiting.job] or self._held(waiting.job):
                self._waiters[waiting.job] = waiter
                self._returning.add(waiting.job)
                self._admit_returned()
            elif not self._replacements.lost_members(waiting.job):
                self._queue.put(waiting)
                self._waiters[waiting.job] = waiter
                self._admit()

    def replace(
        self, job: str, lost: Sequence[management_pb2.NodeInfo], waiter: Waiter, *, priority: int, created: float
    ) -> str:
        """Have a job wait for other nodes in place of lost ones; those of them that are still there are given up.

        Returns what is wrong with that, if anything is.
        """
        with self._lock:
            known = self._jobs.get(job, {})
            members = {node.member for node in lost}
            if not members <= known.keys():
                return f"{job} has no nodes {', '.join(sorted(members - known.keys()))}"[:MAX_PROBLEM]
            for node in lost:
                self._homes.pop(node.address, None)
                for other in self._nodes.values():
                    if other.info.job == job and _is_same(node, other.info):
                        other.info.member = ""
            replacement = Replacement(job=job, nodes=known, lost=members, priority=priority, created=created)
            if not self._replacements.put(replacement):
                return f"{job} waits for {MAX_REQUESTS} answers already"
            self._waiters[job] = waiter
            self._admit()
        return ""

    def reduce(self, job: str, nodes: Sequence[management_pb2.NodeInfo], waiter: Waiter) -> str:
        """Have a job go on with some of its nodes, as these members, and wait for no others; as replace."""
        with self._lock:
            known = {node.address for node in self._jobs.get(job, {}).values()}
            strangers = {node.address for node in nodes} - known
            if strangers:
                return f"{job} has no nodes at {', '.join(sorted(strangers))}"[:MAX_PROBLEM]
            members = {node.address: node.member for node in nodes}
            for node in self._nodes.values():
                if node.info.job == job:
                    node.info.member = members.get(node.info.address, "")
            answers = 1 + self._replacements.num_requests(job)
            if job in self._last_statuses:
                waiter.queued(management_pb2.QueueStatus())
            self._forget(job)
            held = {node.member: node for node in self._held(job)}
            self._jobs[job] = {node.member: held.get(node.member, node) for node in nodes}
            for _ in range(answers):
                waiter.admitted(list(self._jobs[job].values()))
            self._admit()
        return ""

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
            self._replacements.set_priority(job, priority)
            self._admit()

    def queue_status(self) -> Mapping[str, management_pb2.QueueStatus]:
        """Where each job is in the queue, or what it waits for in place of lost nodes."""
        with self._lock:
            return self._status()

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
                self._homes.clear()
                self._free(lambda holder: holder not in self._jobs)
            self._admit()
            since = self._impossible_since
            self._impossible_since = {
                waiting.job: since.get(waiting.job, now) for waiting in self._queue.impossible(self._infos())
            }
            for waiting in self._queue.ordered():
                impossible_since = self._impossible_since.get(waiting.job)
                if impossible_since is not None and now - impossible_since >= deadlines.REGISTRATION.missing_nodes:
                    inventory = Inventory(self._infos())
                    self._waiters[waiting.job].refused(refusal(waiting.wanted, inventory, self.address))
                    self._forget(waiting.job)
            for job, status in self._status().items():
                if status != self._last_statuses.get(job):
                    self._last_statuses[job] = status
                    self._waiters[job].queued(status)

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _infos(self) -> Sequence[management_pb2.NodeInfo]:
        return [node.info for node in self._nodes.values()]

    def _held(self, job: str) -> Sequence[management_pb2.NodeInfo]:
        now = time.monotonic()
        return [
            _with_lease(node.info, node.expires - now)
            for node in self._nodes.values()
            if node.info.job == job and node.info.member
        ]

    def _is_member(self, hello: management_pb2.RegisterRequest) -> bool:
        """Whether a node that says that it works for a job has its place there still."""
        known = self._jobs.get(hello.job)
        if known and (hello.member not in known or known[hello.member].address != hello.address):
            return False
        if hello.member in self._replacements.lost_members(hello.job):
            return False
        return not any((info.job, info.member) == (hello.job, hello.member) for info in self._infos())

    def _keep_returned(self, info: management_pb2.NodeInfo) -> None:
        """A node that works for nobody is kept for the job that it worked for before management was started."""
        job, member = self._homes.get(info.address, ("", ""))
        before = self._jobs.get(job, {}).get(member)
        if before is not None and before.role == info.role:
            del self._homes[info.address]
            info.job, info.member = job, member

    def _is_missed(self, node: management_pb2.NodeInfo) -> bool:
        """Whether a job must be told that it is gone; one that the job was not told of yet is replaced again."""
        return bool(node.job and node.member) and node.member not in self._replacements.lost_members(node.job)

    def _status(self) -> Mapping[str, management_pb2.QueueStatus]:
        infos = self._infos()
        return {**self._queue.status(infos), **self._replacements.status(infos, self.address)}

    def _admit(self) -> None:
        """Something has changed: give nodes to the jobs whose turn it is."""
        self._admit_returned()
        now = time.monotonic()
        infos = self._infos()
        for admission in (*self._replacements.admit(infos), *self._queue.admit(infos)):
            waiter = self._waiters[admission.job]
            if admission.job in self._last_statuses:
                waiter.queued(management_pb2.QueueStatus())
            self._forget(admission.job)
            given = []
            for node in admission.nodes:
                there = self._nodes.get(node.node_id)
                given.append(
                    _with_lease(there.info, there.expires - now) if there is not None and there.info is node else node
                )
            self._jobs[admission.job] = {node.member: node for node in given}
            for _ in range(admission.answers):
                waiter.admitted(given)
        self.changes.notify()

    def _admit_returned(self) -> None:
        """Give the jobs that ask for the nodes which they have already those, when they are there again."""
        awaited = {job for job, _ in self._homes.values()}
        for job in list(self._returning):
            if job not in awaited or time.monotonic() >= self._returning_until:
                held = {node.member: node for node in self._held(job)}
                known = self._jobs[job] or held
                self._waiters[job].admitted(
                    [held.get(member) or _with_lease(node, 0.0) for member, node in known.items()]
                )
                self._forget(job)

    def _forget(self, job: str) -> None:
        self._returning.discard(job)
        self._queue.remove(job)
        self._replacements.remove(job)
        for table in (self._waiters, self._last_statuses, self._impossible_since):
            table.pop(job, None)

    def _free(self, is_over: Callable[[str], bool]) -> None:
        for node in self._nodes.values():
            if node.info.job and is_over(node.info.job):
                node.info.job = node.info.member = ""


def _is_same(one: management_pb2.NodeInfo | None, other: management_pb2.NodeInfo) -> bool:
    """Whether both are the same node of a job, also if it has registered anew in between."""
    return one is not None and (one.member, one.address) == (other.member, other.address)


def _with_lease(node: management_pb2.NodeInfo, seconds: float) -> management_pb2.NodeInfo:
    """seconds: that are left of its lease."""
    info = management_pb2.NodeInfo()
    info.CopyFrom(node)
    info.lease_left_seconds = max(0.0, seconds)
    return info
