"""The queue of jobs that wait for nodes. Pure: no clock.

The order is strict: by priority, then by age. The first job gets its nodes all at once, as soon as they are free. No
job overtakes it, even with nodes that the first job cannot use: the wait of a large job is bounded by the running jobs,
however many small ones arrive. A job that the whole cluster could not satisfy is skipped until it is refused, or nodes
are added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, TypeAlias

from appliance.management.nodes.allocation import Inventory, lacking, lease, possible, waiting_for
from wsc.v1 import management_pb2, node_pb2

_Role: TypeAlias = "node_pb2.Role.ValueType"

QUEUE_ORDER: Final = attrgetter("priority", "created", "job")  # sort key of waiting jobs: the smallest is the next
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
    """The nodes that a job gets."""

    job: str
    nodes: Sequence[management_pb2.NodeInfo]
    answers: int = 1  # number of requests that this answers


class JobQueue:
    """The queue of jobs that wait for nodes."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}

    def put(self, waiting: Waiting) -> None:
        self._waiting[waiting.job] = waiting

    def remove(self, job: str) -> None:
        """Removes a job, if it waits."""
        self._waiting.pop(job, None)

    def set_priority(self, job: str, priority: int) -> None:
        """Changes the priority of a job, if it waits."""
        if job in self._waiting:
            self._waiting[job].priority = priority

    def ordered(self) -> Sequence[Waiting]:
        """Returns the jobs in order."""
        return sorted(self._waiting.values(), key=QUEUE_ORDER)

    def admit(self, nodes: Sequence[management_pb2.NodeInfo]) -> Sequence[Admission]:
        """Leases nodes to jobs in order, and removes these from the queue. Marks the nodes."""
        if not self._waiting:
            return []
        admissions = []
        inventory = Inventory(nodes)
        for waiting in self.ordered():
            if not possible(waiting.wanted, inventory):
                continue
            given = lease(waiting.job, waiting.wanted, inventory)
            if given is None:
                break
            del self._waiting[waiting.job]
            admissions.append(Admission(job=waiting.job, nodes=given))
        return admissions

    def impossible(self, nodes: Sequence[management_pb2.NodeInfo]) -> Sequence[Waiting]:
        """Returns the jobs that all these nodes together could not satisfy."""
        if not self._waiting:
            return []
        inventory = Inventory(nodes)
        return [waiting for waiting in self.ordered() if not possible(waiting.wanted, inventory)]

    def lacking(self, nodes: Sequence[management_pb2.NodeInfo]) -> Mapping[_Role, int]:
        """Returns how many nodes of each role the next job lacks."""
        if not self._waiting:
            return {}
        inventory = Inventory(nodes)
        following = (waiting for waiting in self.ordered() if possible(waiting.wanted, inventory))
        first = next(following, None)
        return {} if first is None else lacking(first.wanted, inventory)

    def status(self, nodes: Sequence[management_pb2.NodeInfo]) -> Mapping[str, management_pb2.QueueStatus]:
        """Returns each job's position and the nodes that it waits for."""
        if not self._waiting:
            return {}
        inventory = Inventory(nodes)
        ordered = self.ordered()
        statuses: dict[str, management_pb2.QueueStatus] = {}
        next_job = ""  # the job whose turn it is
        for position, waiting in enumerate(ordered, 1):
            lacks, holders = waiting_for(waiting.job, waiting.wanted, inventory)
            if not lacks:
                lacks = f"its turn, after {next_job}" if next_job else "its nodes"
            if not next_job and possible(waiting.wanted, inventory):
                next_job = waiting.job
            statuses[waiting.job] = management_pb2.QueueStatus(
                position=position,
                length=len(ordered),
                waiting_for=lacks,
                holders=[management_pb2.Holder(job=job) for job in holders],
            )
        return statuses
