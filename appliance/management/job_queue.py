"""The queue of the jobs that wait for nodes. Pure: no threads, no clock.

The order is strict: by priority, then by age. The first job gets its nodes as soon as they are free, all at once, and
nobody overtakes it meanwhile, not even with nodes that it has no use for now: so the wait of a large job is bounded by
the jobs that run, however many small ones come. Only a job that this cluster could never satisfy, were it all free, is
passed over: it is in nobody's way until it is refused, or until nodes are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.management.allocation import lease, possible, waiting_for
from wsc.v1 import management_pb2

FIRST_PRIORITY, DEFAULT_PRIORITY, LAST_PRIORITY = 1, 2, 3


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A job in the queue."""

    job: str
    wanted: management_pb2.Acquire
    priority: int
    created: float  # seconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A job that has got its nodes."""

    job: str
    nodes: Sequence[management_pb2.NodeInfo]


class JobQueue:
    """Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}

    def put(self, waiting: Waiting) -> None:
        self._waiting[waiting.job] = waiting

    def remove(self, job: str) -> None:
        """No effect if it does not wait."""
        self._waiting.pop(job, None)

    def set_priority(self, job: str, priority: int) -> None:
        """No effect if it does not wait."""
        if job in self._waiting:
            self._waiting[job].priority = priority

    def ordered(self) -> Sequence[Waiting]:
        """The first is the next."""
        return sorted(self._waiting.values(), key=lambda waiting: (waiting.priority, waiting.created, waiting.job))

    def admit(self, nodes: Sequence[management_pb2.NodeInfo]) -> Sequence[Admission]:
        """Give nodes to the jobs whose turn it is, which leave the queue. Marks the nodes."""
        admissions = []
        for waiting in self.ordered():
            if not possible(waiting.wanted, nodes):
                continue
            given = lease(waiting.job, waiting.wanted, nodes)
            if given is None:
                break
            del self._waiting[waiting.job]
            admissions.append(Admission(job=waiting.job, nodes=given))
        return admissions

    def impossible(self, nodes: Sequence[management_pb2.NodeInfo]) -> Sequence[Waiting]:
        """The jobs that all these nodes together could not satisfy."""
        return [waiting for waiting in self.ordered() if not possible(waiting.wanted, nodes)]

    def status(self, job: str, nodes: Sequence[management_pb2.NodeInfo]) -> management_pb2.QueueStatus | None:
        """Where the job is and what it waits for; None if it does not wait."""
        ordered = self.ordered()
        position = next((place for place, waiting in enumerate(ordered, 1) if waiting.job == job), None)
        if position is None:
            return None
        lacking = waiting_for(ordered[position - 1].wanted, nodes)
        if not lacking:
            before = [waiting.job for waiting in ordered[: position - 1] if possible(waiting.wanted, nodes)]
            lacking = f"its turn, after {before[0]}" if before else "its nodes"
        return management_pb2.QueueStatus(position=position, length=len(ordered), waiting_for=lacking)
