"""Who is who among the processes of a job: the cluster as an input_fn sees it."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cstorch.distributed import streaming


class TaskRole(Enum):
    """What a process is to a job: the script, or an input worker."""

    MASTER = "MASTER"
    WORKER = "WORKER"


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A process.

    rank: its number among those of its role.
    local_rank: the same among the workers of its system.
    wse_id: the number of the system that it feeds; 0 for the script.
    node_name: its host, where that is known.
    roles: what it is to the job, where that is known.
    """

    rank: int
    local_rank: int
    wse_id: int
    node_name: str = ""
    roles: Sequence[TaskRole] | None = None


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The processes of one role: in a worker all workers, on the client the script alone.

    rank: the number of this process among the tasks.
    """

    tasks: Sequence[TaskSpec]
    rank: int
    num_csx: int
    num_workers_per_csx: int

    def num_tasks(self) -> int:
        """How many there are."""
        return len(self.tasks)

    def task(self, rank: int | None = None) -> TaskSpec:
        """A process; by default this one."""
        return self.tasks[self.rank if rank is None else rank]


class ClusterResolver:
    """Answers for this process."""

    @property
    def task_role(self) -> TaskRole:
        """What this process is."""
        return TaskRole.WORKER if streaming.is_streamer() else TaskRole.MASTER

    @property
    def num_tasks(self) -> int:
        """How many processes have its role."""
        return streaming.num_tasks()

    def assumes_role(self, role: TaskRole) -> bool:
        """Whether this process has the role."""
        return self.task_role is role

    def cluster_spec(self) -> ClusterSpec:
        """The processes that have its role. An input_fn that asks is taken to shard, as by get_streaming_rank."""
        per_csx, own = streaming.num_workers_per_csx(), streaming.get_streaming_rank()
        tasks = [
            TaskSpec(rank, rank % per_csx, rank // per_csx, socket.gethostname() if rank == own else "")
            for rank in range(streaming.num_tasks())
        ]
        return ClusterSpec(tasks, own, streaming.num_csx(), per_csx)


class BaseServiceResolver:
    """What `service_resolver` returns."""

    @classmethod
    def get_resolver(cls) -> "BaseServiceResolver":
        """The resolver of this process."""
        return cls()

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Answers for this process."""
        return ClusterResolver()

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The processes that have the role of this one."""
        return self.cluster_resolver.cluster_spec()

    def streamer_ordinals(self) -> list[int]:
        """The numbers of the processes that stream input."""
        return list(range(streaming.num_streamers()))

    def receiver_ordinals(self) -> list[int]:
        """The numbers of those that receive output."""
        return list(range(streaming.num_receivers()))


def service_resolver() -> BaseServiceResolver:
    """Who is who in the cluster, as far as this process knows."""
    return BaseServiceResolver.get_resolver()
