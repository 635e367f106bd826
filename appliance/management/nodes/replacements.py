"""The jobs that wait for replacements of lost nodes. Pure: no clock.

They precede all jobs in the queue, and have its order among themselves. They get free nodes one by one; a job resumes
when it has all of them. Two jobs may hold nodes that the other waits for, as after a loss of nodes that leaves too few
for both; so a job gives up nodes for those before it that have waited for a while.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from appliance.management.nodes.allocation import Inventory, how_to_add
from appliance.management.nodes.job_queue import QUEUE_ORDER, Admission
from waferbox import deadlines, roles
from wsc.v1 import management_pb2, node_pb2

_Role: TypeAlias = "node_pb2.Role.ValueType"

MAX_REQUESTS = 256  # unanswered requests of one job


@dataclass(slots=True, kw_only=True)
class Replacement:
    """The replacements that a job waits for."""

    job: str
    nodes: Mapping[str, management_pb2.NodeInfo]  # all nodes of the job, by member
    lost: set[str]  # members that lack a node
    bound: set[str]  # members, also of those it has, that only a node on the same host can replace
    priority: int
    created: float  # seconds since 1970
    since: float  # monotonic: when it began to wait
    requests: int = 1  # of the coordinator, each of which gets an answer


class Replacements:
    """The jobs that wait for replacements."""

    def __init__(self) -> None:
        self._waiting: dict[str, Replacement] = {}

    def put(self, replacement: Replacement) -> bool:
        """Adds a job, or lost members to a waiting job; False if it has too many requests."""
        waiting = self._waiting.setdefault(replacement.job, replacement)
        if waiting is not replacement:
            if waiting.requests >= MAX_REQUESTS:
                return False
            waiting.lost |= replacement.lost
            waiting.bound = replacement.bound
            waiting.requests += 1
        return True

    def remove(self, job: str) -> None:
        """Removes a job, if it waits."""
        self._waiting.pop(job, None)

    def set_priority(self, job: str, priority: int) -> None:
        """Changes the priority of a job, if it waits."""
        if job in self._waiting:
            self._waiting[job].priority = priority

    def lost_members(self, job: str) -> set[str]:
        """Returns the members of a job that were lost, including those with a replacement, until all have one."""
        return self._waiting[job].lost if job in self._waiting else set()

    def lacking_members(
        self, job: str, nodes: Sequence[management_pb2.NodeInfo]
    ) -> Mapping[str, management_pb2.NodeInfo]:
        """Returns the lost nodes of a job that have no replacement yet, by member. nodes: all nodes."""
        waiting = self._waiting.get(job)
        if waiting is None:
            return {}
        return {member: waiting.nodes[member] for member in waiting.lost - _held(waiting, nodes).keys()}

    def num_requests(self, job: str) -> int:
        """Returns the number of unanswered requests of a job."""
        return self._waiting[job].requests if job in self._waiting else 0

    def admit(self, nodes: Sequence[management_pb2.NodeInfo], now: float) -> Sequence[Admission]:
        """Leases free nodes to the jobs; returns those that lack none any more. Marks the nodes.

        A lost MemoryX node has left its recovery points on the disk of its host, where a launcher is about to start
        another: a node on another host takes its place only after a while, or never if the job has no copy of them.

        Args:
            nodes: all nodes.
            now: monotonic time.
        """
        if not self._waiting:
            return []
        admissions = []
        inventory = Inventory(nodes)
        for waiting in self._ordered():
            held = _held(waiting, nodes)
            for member in sorted(waiting.lost - held.keys()):
                lost = waiting.nodes[member]
                is_patient = lost.role == node_pb2.ROLE_MEMORYX and now - waiting.since < deadlines.RECOVERY.launcher
                must_be_there = is_patient or member in waiting.bound
                if inventory.free_at(lost.role, lost.host) or (inventory.free[lost.role] and not must_be_there):
                    node = inventory.take(lost.role, waiting.job, lost.host)
                    node.job, node.member = waiting.job, member
                    held[member] = node
            if waiting.lost <= held.keys():
                del self._waiting[waiting.job]
                # Other members may not have registered again since the restart of management.
                given = [held.get(member, node) for member, node in waiting.nodes.items()]
                admissions.append(Admission(job=waiting.job, nodes=given, answers=waiting.requests))
        return admissions

    def status(
        self, nodes: Sequence[management_pb2.NodeInfo], management: str
    ) -> Mapping[str, management_pb2.QueueStatus]:
        """Returns the nodes that each job waits for, and how to add them."""
        if not self._waiting:
            return {}
        inventory = Inventory(nodes)
        statuses: dict[str, management_pb2.QueueStatus] = {}
        for waiting in self._ordered():
            missing = waiting.lost - _held(waiting, nodes).keys()
            bound = sorted(missing & waiting.bound)
            missing -= waiting.bound
            counts = Counter(waiting.nodes[member].role for member in missing)
            texts = [f"{member} on {waiting.nodes[member].host}, whose disk has states of the job" for member in bound]
            named: dict[str, None] = {}
            for role in roles.LEASED:
                count = counts[role.number]
                if not count:
                    continue
                holders = inventory.holders(role.number, besides=waiting.job)
                where = f"held by {', '.join(holders)}" if holders else "not in the cluster"
                named.update(dict.fromkeys(holders))
                texts.append(f"{role.counted(count)}, {where}; {how_to_add(count, role.number, management)}")
            statuses[waiting.job] = management_pb2.QueueStatus(
                waiting_for="; ".join(texts), holders=[management_pb2.Holder(job=job) for job in named]
            )
        return statuses

    def lacking(self, nodes: Sequence[management_pb2.NodeInfo]) -> Counter[_Role]:
        """Returns how many nodes of each role the first job lacks that need not be on a certain host."""
        for waiting in self._ordered():
            missing = waiting.lost - waiting.bound - _held(waiting, nodes).keys()
            if missing:
                return Counter(waiting.nodes[member].role for member in missing)
        return Counter()

    def to_give_up(
        self, nodes: Sequence[management_pb2.NodeInfo], waiting_since: float
    ) -> Sequence[management_pb2.NodeInfo]:
        """Returns nodes that waiting jobs must give up for others that come before them, and marks them as lost.

        nodes: all nodes. waiting_since: only jobs that wait since then, or longer, get such nodes.
        """
        given_up: list[management_pb2.NodeInfo] = []
        ordered = self._ordered()
        for place, first in enumerate(ordered):
            if first.since > waiting_since:
                continue
            lacking = first.lost - first.bound - _held(first, nodes).keys()
            missing = Counter(first.nodes[member].role for member in lacking)
            # Nodes that another job has given up are free soon.
            missing.subtract(node.role for node in nodes if not node.job or not node.member)
            for later in reversed(ordered[place + 1 :]):
                for node in _held(later, nodes).values():
                    if missing[node.role] > 0:
                        missing[node.role] -= 1
                        later.lost.add(node.member)
                        given_up.append(node)
        return given_up

    def _ordered(self) -> Sequence[Replacement]:
        return sorted(self._waiting.values(), key=QUEUE_ORDER)


def _held(waiting: Replacement, nodes: Sequence[management_pb2.NodeInfo]) -> dict[str, management_pb2.NodeInfo]:
    """Returns the registered members of the job; without nodes that were given up."""
    return {node.member: node for node in nodes if node.job == waiting.job and node.member}
