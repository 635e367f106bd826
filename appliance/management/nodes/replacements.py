"""The jobs that wait for nodes in place of those that they have lost. Pure: no threads, no clock.

They come before all jobs in the queue, and have its order among themselves. Free nodes are theirs one by one, as they
come; such a job goes on when all its places are taken.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from appliance.management.nodes.allocation import Inventory, how_to_add
from appliance.management.nodes.job_queue import QUEUE_ORDER, Admission
from waferbox import roles
from wsc.v1 import management_pb2

MAX_REQUESTS = 256  # of one job, that wait for an answer


@dataclass(slots=True, kw_only=True)
class Replacement:
    """What a job waits for."""

    job: str
    nodes: Mapping[str, management_pb2.NodeInfo]  # all of the job, by member
    lost: set[str]  # the members whose places are to be taken
    priority: int
    created: float  # seconds since 1970
    requests: int = 1  # of the coordinator, each of which is answered


class Replacements:
    """Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        self._waiting: dict[str, Replacement] = {}

    def put(self, replacement: Replacement) -> bool:
        """Have a job wait; one that waits already waits for these nodes too. False: it has asked too often."""
        waiting = self._waiting.setdefault(replacement.job, replacement)
        if waiting is not replacement:
            if waiting.requests >= MAX_REQUESTS:
                return False
            waiting.lost |= replacement.lost
            waiting.requests += 1
        return True

    def remove(self, job: str) -> None:
        """No effect if it does not wait."""
        self._waiting.pop(job, None)

    def set_priority(self, job: str, priority: int) -> None:
        """No effect if it does not wait."""
        if job in self._waiting:
            self._waiting[job].priority = priority

    def lost_members(self, job: str) -> set[str]:
        """JobScope places are to be taken; until all are, also those that are."""
        return self._waiting[job].lost if job in self._waiting else set()

    def num_requests(self, job: str) -> int:
        """How many of the job's wait for an answer."""
        return self._waiting[job].requests if job in self._waiting else 0

    def admit(self, nodes: Sequence[management_pb2.NodeInfo]) -> Sequence[Admission]:
        """Give free nodes to the jobs, and let those go on that lack nothing any more. Marks the nodes."""
        admissions = []
        inventory = Inventory(nodes if self._waiting else ())
        for waiting in self._ordered():
            held = _held(waiting, nodes)
            for member in sorted(waiting.lost - held.keys()):
                for node in inventory.take(waiting.nodes[member].role, 1, waiting.job):
                    node.job, node.member = waiting.job, member
                    held[member] = node
            if waiting.lost <= held.keys():
                del self._waiting[waiting.job]
                # One of the others may be a node that has not registered anew since management was away.
                given = [held.get(member, node) for member, node in waiting.nodes.items()]
                admissions.append(Admission(job=waiting.job, nodes=given, answers=waiting.requests))
        return admissions

    def status(
        self, nodes: Sequence[management_pb2.NodeInfo], management: str
    ) -> Mapping[str, management_pb2.QueueStatus]:
        """What each job waits for, and how to add it."""
        inventory = Inventory(nodes if self._waiting else ())
        statuses: dict[str, management_pb2.QueueStatus] = {}
        for waiting in self._ordered():
            missing = waiting.lost - _held(waiting, nodes).keys()
            counts = Counter(waiting.nodes[member].role for member in missing)
            texts = []
            for role in roles.LEASED:
                count = counts[role.number]
                if not count:
                    continue
                holders = inventory.holders(role.number, besides=waiting.job)
                where = f"held by {holders}" if holders else "not in the cluster"
                texts.append(f"{role.counted(count)}, {where}; {how_to_add(count, role.number, management)}")
            statuses[waiting.job] = management_pb2.QueueStatus(waiting_for="; ".join(texts))
        return statuses

    def _ordered(self) -> Sequence[Replacement]:
        return sorted(self._waiting.values(), key=QUEUE_ORDER)


def _held(waiting: Replacement, nodes: Sequence[management_pb2.NodeInfo]) -> dict[str, management_pb2.NodeInfo]:
    """The job's nodes that are there, by member; one that was given up is none of them."""
    return {node.member: node for node in nodes if node.job == waiting.job and node.member}
