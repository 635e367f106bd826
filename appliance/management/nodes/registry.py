"""The nodes of the cluster, their leases, and the jobs that wait for nodes.

A node is registered while its Register stream is open and heartbeats arrive. Jobs lease nodes; the loss of a leased
node is reported to its job, and no job of the queue gets the node that could replace it until the job has requested
one. A node that its job has given up keeps the job's name, without being a member, until it
reports that it has released the job; then it is free. After a restart of management, nodes that work for jobs may
register before these jobs' coordinators; they are kept for the jobs for a while.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.management.nodes.allocation import Inventory, refusal
from appliance.management.nodes.job_queue import JobQueue, Waiting
from appliance.management.nodes.replacements import MAX_REQUESTS, Replacement, Replacements
from waferbox import deadlines
from waferbox.host.clock import Clock
from waferbox.host.event_loop import Changes
from wsc.v1 import management_pb2, node_pb2

MAX_NODES = 16_384
MAX_PROBLEM = 500  # characters of a message


class RegistryFull(RuntimeError):
    """Raised when there are as many nodes as a cluster may have."""


class Waiter(Protocol):
    """The receiver of a waiting job's nodes. It must not call the registry."""

    def queued(self, status: management_pb2.QueueStatus) -> None:
        """The job waits at this position; at position 0 it no longer waits."""

    def admitted(self, nodes: Sequence[management_pb2.NodeInfo]) -> None:
        """The job gets these nodes."""

    def refused(self, refusal: str) -> None:
        """The job gets no nodes, because the cluster lacks them."""


@dataclass(slots=True, kw_only=True)
class _Node:
    info: management_pb2.NodeInfo  # without the seconds of the lease, which change
    expires: float


class NodeRegistry:
    """The registered nodes, with the jobs that lease them or wait for some."""

    def __init__(
        self, lease_seconds: float, clock: Clock, on_lost: Callable[[management_pb2.NodeInfo, str], None]
    ) -> None:
        """on_lost(node, reason): called when a leased node is lost."""
        self._clock = clock
        self.address = "HOST:PORT"  # of the management service, for messages
        self._lease_seconds = lease_seconds
        self._on_lost = on_lost
        self._nodes: dict[str, _Node] = {}
        self._ids: dict[tuple[str, str], str] = {}  # by host and address
        self._numbers = itertools.count()
        self.changes = Changes()  # of the results of nodes() and ingress()
        # Jobs that may hold nodes; with those, by member, that their coordinators reported.
        self._jobs: dict[str, Mapping[str, management_pb2.NodeInfo]] = {}
        self._returning_until = self._clock.monotonic() + deadlines.REGISTRATION.return_to_job
        # Until then: job and member, by address, of nodes that have not registered since the restart of management.
        self._homes: dict[str, tuple[str, str]] = {}
        # Lost members, by job, until the job requests replacements, is reduced or ends, or they register again.
        self._missing: dict[str, dict[str, management_pb2.NodeInfo]] = {}
        self._queue = JobQueue()
        self._replacements = Replacements()
        self._waiters: dict[str, Waiter] = {}
        self._returning: dict[str, None] = {}  # those that already have nodes, which must register again
        self._last_statuses: dict[str, management_pb2.QueueStatus] = {}  # the last status sent to each waiter
        self._impossible_since: dict[str, float] = {}
        # When a node was lost. Before the start there may have been another service, whose nodes will register again.
        self._last_loss = self._clock.monotonic()

    # --- nodes --------------------------------------------------------------------------------------------------------

    def add(self, hello: management_pb2.RegisterRequest) -> str:
        """Adds a node; returns its id. Raises RegistryFull.

        An earlier registration of the same node ends: its stream broke, which management has not noticed yet.
        """
        self.remove(self._ids.get((hello.host, hello.address), ""), "it registered again")
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
            states_in_files=hello.states_in_files,
            instance=hello.instance,
        )
        now = self._clock.monotonic()
        if hello.job and (hello.job in self._jobs or now < self._returning_until):
            self._homes.pop(hello.address, None)
            info.job, info.member = hello.job, hello.member if self._is_member(hello) else ""
            self._missing.get(hello.job, {}).pop(info.member, None)
        elif not hello.job:
            self._keep_returned(info)
        self._nodes[node_id] = _Node(info=info, expires=now + self._lease_seconds)
        self._ids[info.host, info.address] = node_id
        self._admit()
        return node_id

    def renew(self, node_id: str, job: str) -> bool:
        """Renews a lease; False if it had expired: the node must register again. job: the one attached to the node."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.expires = self._clock.monotonic() + self._lease_seconds
            if node.info.job and not node.info.member and not job:
                node.info.job = ""  # given up by its job, which it has now released
                self._admit()
        return node is not None

    def remove(self, node_id: str, reason: str) -> None:
        """Removes a node; idempotent."""
        node = self._nodes.pop(node_id, None)
        if node is None:
            return
        del self._ids[node.info.host, node.info.address]
        self._last_loss = self._clock.monotonic()
        is_missed = self._is_missed(node.info)
        if is_missed and node.info.job in self._jobs:
            self._missing.setdefault(node.info.job, {})[node.info.member] = node.info
        self._admit()
        if is_missed:
            self._on_lost(node.info, reason)

    def count(self) -> int:
        """Returns the number of nodes."""
        return len(self._nodes)

    def nodes(self) -> Sequence[management_pb2.NodeInfo]:
        """Returns all nodes, in the order of their registration."""
        now = self._clock.monotonic()
        return [_with_lease(node.info, node.expires - now) for node in self._nodes.values()]

    def ingress(self) -> str:
        """Returns the address of an ingress; empty if there is none."""
        return next((node.address for node in self._infos() if node.role == node_pb2.ROLE_INGRESS), "")

    def held(self, job: str) -> Sequence[management_pb2.NodeInfo]:
        """Returns the nodes that a job leases."""
        return self._held(job)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def open(self, job: str, nodes: Sequence[management_pb2.NodeInfo] | None = None) -> None:
        """Allows a job to hold nodes, including those that were kept for it.

        nodes: as its coordinator reports them after a restart of management; None for a new job.
        """
        known = self._jobs[job] = {node.member: node for node in nodes or ()}
        if nodes is not None and (now := self._clock.monotonic()) < self._returning_until:
            self._last_loss = now  # the cluster may have nodes that this service has not seen
            self._homes.update((node.address, (job, node.member)) for node in nodes)
        for node in self._nodes.values():
            if node.info.job:
                self._homes.pop(node.info.address, None)
            else:
                self._keep_returned(node.info)
            if node.info.job == job and known and not _is_same(known.get(node.info.member), node.info):
                node.info.member = ""

    def release(self, job: str) -> None:
        """Removes an ended job from the queue, and frees its nodes."""
        self._jobs.pop(job, None)
        self._missing.pop(job, None)
        self._forget(job)
        self._free(lambda holder: holder == job)
        self._admit()

    def enqueue(self, waiting: Waiting, waiter: Waiter) -> None:
        """Adds a job to the queue. A job that has nodes already gets the same ones again, dead ones included.

        After a restart of management it gets them once they have registered: only then do they accept a new lease.
        """
        if waiting.job not in self._jobs:
            return
        if self._jobs[waiting.job] or self._held(waiting.job):
            self._waiters[waiting.job] = waiter
            self._returning[waiting.job] = None
            self._admit_returned()
        elif not self._replacements.lost_members(waiting.job):
            self._queue.put(waiting)
            self._waiters[waiting.job] = waiter
            self._admit()

    def replace(
        self, job: str, request: management_pb2.Replace, waiter: Waiter, *, priority: int, created: float
    ) -> str:
        """Adds a job to those that wait for replacements; lost nodes that are still registered are given up.

        Returns a problem of the request, or an empty text.
        """
        known = self._jobs.get(job, {})
        members = {node.member for node in request.nodes}
        if not members <= known.keys():
            return f"{job} has no nodes {', '.join(sorted(members - known.keys()))}"[:MAX_PROBLEM]
        for node in request.nodes:
            self._homes.pop(node.address, None)
            self._missing.get(job, {}).pop(node.member, None)
            for other in self._nodes.values():
                if other.info.job == job and _is_same(node, other.info):
                    other.info.member = ""
        replacement = Replacement(
            job=job,
            nodes=known,
            lost=members,
            bound=known.keys() & request.bound,
            priority=priority,
            created=created,
            since=self._clock.monotonic(),
        )
        if not self._replacements.put(replacement):
            return f"{job} waits for {MAX_REQUESTS} answers already"
        self._waiters[job] = waiter
        self._admit()
        return ""

    def reduce(self, job: str, nodes: Sequence[management_pb2.NodeInfo], waiter: Waiter) -> str:
        """Reduces a job to some of its nodes, as these members, so that it waits for no others; returns as replace.

        Without nodes the job is preempted, and may be enqueued again.
        """
        known = {node.address for node in self._jobs.get(job, {}).values()}
        strangers = {node.address for node in nodes} - known
        if strangers:
            return f"{job} has no nodes at {', '.join(sorted(strangers))}"[:MAX_PROBLEM]
        self._missing.pop(job, None)
        members = {node.address: node.member for node in nodes}
        # Nodes that have not registered since the restart of management are not kept for the job either.
        self._homes = {at: home for at, home in self._homes.items() if home[0] != job or at in members}
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

    def leave(self, job: str, waiter: Waiter, *, has_ended: bool) -> None:
        """Removes a job from the queue, unless another waiter has taken its place.

        has_ended: whether it no longer needs nodes; otherwise its coordinator may come back, or get a successor.
        """
        if self._waiters.get(job) is waiter:
            if not has_ended:
                self._missing.setdefault(job, {}).update(self._replacements.lacking_members(job, self._infos()))
            self._forget(job)
            self._admit()

    def set_priority(self, job: str, priority: int) -> None:
        """Changes a job's priority, and thereby its position."""
        self._queue.set_priority(job, priority)
        self._replacements.set_priority(job, priority)
        self._admit()

    def queue_status(self) -> Mapping[str, management_pb2.QueueStatus]:
        """Returns each job's position in the queue, or the replacements that it waits for."""
        return self._status()

    def to_preempt(self, idle: Sequence[str]) -> Sequence[str]:
        """Returns the jobs, of these idle ones and in this order, whose nodes a waiting job lacks."""
        infos = self._infos()
        missing = self._replacements.lacking(infos) or Counter(self._queue.lacking(infos))
        # Nodes that another job has given up are free soon.
        missing.subtract(node.role for node in infos if node.job and not node.member)
        chosen = []
        for job in idle:
            held = Counter(node.role for node in infos if node.job == job and node.member)
            if any(missing[role] > 0 for role in held):
                chosen.append(job)
                missing.subtract(held)
        return chosen

    # --- time ---------------------------------------------------------------------------------------------------------

    def expire(self) -> list[str]:
        """Removes the nodes whose lease has expired; returns their ids."""
        now = self._clock.monotonic()
        expired = [node_id for node_id, node in self._nodes.items() if node.expires <= now]
        for node_id in expired:
            self.remove(node_id, f"it has sent nothing for {self._lease_seconds:g} s")
        return expired

    def review(self) -> None:
        """Does what is due after a while.

        Sends changed statuses, refuses jobs that stay impossible, takes nodes from jobs that wait for others for the
        jobs before them, and ends the time for nodes to register again.
        """
        now = self._clock.monotonic()
        if now >= self._returning_until:
            self._homes.clear()
            self._free(lambda holder: holder not in self._jobs)
        self._admit()
        for node in self._replacements.to_give_up(self._infos(), now - deadlines.REGISTRATION.missing_nodes):
            lost = management_pb2.NodeInfo()
            lost.CopyFrom(node)
            node.member = ""
            self._on_lost(lost, "a job that comes before needs it")
        since = self._impossible_since
        self._impossible_since = {
            waiting.job: since.get(waiting.job, now) for waiting in self._queue.impossible(self._infos())
        }
        may_return = now - self._last_loss < deadlines.REGISTRATION.lost_nodes
        for waiting in [] if may_return else self._queue.ordered():
            impossible_since = self._impossible_since.get(waiting.job)
            if impossible_since is not None and now - impossible_since >= deadlines.REGISTRATION.missing_nodes:
                inventory = Inventory(self._infos())
                self._waiters[waiting.job].refused(refusal(waiting.wanted, inventory, self.address))
                self._forget(waiting.job)
        for job, status in self._status().items():
            if status != self._last_statuses.get(job):
                self._last_statuses[job] = status
                self._waiters[job].queued(status)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _infos(self) -> Sequence[management_pb2.NodeInfo]:
        return [node.info for node in self._nodes.values()]

    def _held(self, job: str) -> Sequence[management_pb2.NodeInfo]:
        now = self._clock.monotonic()
        return [
            _with_lease(node.info, node.expires - now)
            for node in self._nodes.values()
            if node.info.job == job and node.info.member
        ]

    def _is_member(self, hello: management_pb2.RegisterRequest) -> bool:
        """Whether a node that reports a job is still its member."""
        known = self._jobs.get(hello.job)  # none: a preempted job
        if known is not None and (hello.member not in known or known[hello.member].address != hello.address):
            return False
        if hello.member in self._replacements.lost_members(hello.job):
            return False
        return not any((info.job, info.member) == (hello.job, hello.member) for info in self._infos())

    def _keep_returned(self, info: management_pb2.NodeInfo) -> None:
        """Keeps a free node for the job that it worked for before the restart of management."""
        job, member = self._homes.get(info.address, ("", ""))
        before = self._jobs.get(job, {}).get(member)
        if before is not None and (before.address, before.role) == (info.address, info.role):
            del self._homes[info.address]
            info.job, info.member = job, member

    def _is_missed(self, node: management_pb2.NodeInfo) -> bool:
        """Whether the loss of a node must be reported to a job; one that was not yet handed over is replaced again."""
        return bool(node.job and node.member) and node.member not in self._replacements.lost_members(node.job)

    def _status(self) -> Mapping[str, management_pb2.QueueStatus]:
        infos = self._infos()
        return {**self._queue.status(infos), **self._replacements.status(infos, self.address)}

    def _admit(self) -> None:
        """Leases nodes to the next jobs; called after every change."""
        self._admit_returned()
        now = self._clock.monotonic()
        infos = self._infos()
        replaced = self._replacements.admit(infos, now)
        for admission in (*replaced, *self._queue.admit(self._for_queue(infos))):
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

    def _for_queue(self, infos: Sequence[management_pb2.NodeInfo]) -> Sequence[management_pb2.NodeInfo]:
        """Returns the nodes as the queue may lease them: those that could replace missing members are held."""
        free = {info.node_id: info for info in infos if not info.job}
        held: dict[str, management_pb2.NodeInfo] = {}
        for job, members in self._missing.items():
            for lost in members.values():
                fitting = [info for info in free.values() if info.role == lost.role]
                chosen = min(fitting, key=lambda info: info.host != lost.host, default=None)
                if chosen is not None:
                    del free[chosen.node_id]
                    held[chosen.node_id] = management_pb2.NodeInfo(role=chosen.role, host=chosen.host, job=job)
        return [held.get(info.node_id, info) for info in infos] if held else infos

    def _admit_returned(self) -> None:
        """Answers jobs that request the nodes that they have already, once these have registered."""
        awaited = {job for job, _ in self._homes.values()}
        for job in list(self._returning):
            if job not in awaited or self._clock.monotonic() >= self._returning_until:
                held = {node.member: node for node in self._held(job)}
                known = self._jobs[job] or held
                # A held node may have been kept for a replacement that the job does not have yet.
                given = {member: held.get(member) or _with_lease(node, 0.0) for member, node in known.items()}
                self._jobs[job] = given
                self._waiters[job].admitted(list(given.values()))
                self._forget(job)

    def _forget(self, job: str) -> None:
        self._returning.pop(job, None)
        self._queue.remove(job)
        self._replacements.remove(job)
        for table in (self._waiters, self._last_statuses, self._impossible_since):
            table.pop(job, None)

    def _free(self, is_over: Callable[[str], bool]) -> None:
        for node in self._nodes.values():
            if node.info.job and is_over(node.info.job):
                node.info.job = node.info.member = ""


def _is_same(one: management_pb2.NodeInfo | None, other: management_pb2.NodeInfo) -> bool:
    """Whether both are the same node of a job, possibly after another registration."""
    return one is not None and (one.member, one.address) == (other.member, other.address)


def _with_lease(node: management_pb2.NodeInfo, seconds: float) -> management_pb2.NodeInfo:
    """Returns the node with its lease. seconds: left of the lease."""
    info = management_pb2.NodeInfo()
    info.CopyFrom(node)
    info.lease_left_seconds = max(0.0, seconds)
    return info
