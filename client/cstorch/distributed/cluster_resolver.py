"""The roles of the processes of a job, as an input_fn sees them."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cstorch.distributed import streaming


class TaskRole(Enum):
    """The role of a process in a job: the script, or an input worker.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """

    MASTER = "MASTER"
    WORKER = "WORKER"


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One process of a job.

    Args:
        rank: The number among the processes of its role.
        local_rank: The number among the workers of its system.
        wse_id: The number of the system that it feeds; 0 for the script.
        node_name: Its host, if known.
        roles: Its roles in the job, if known.
    """

    rank: int
    local_rank: int
    wse_id: int
    node_name: str = ""
    roles: Sequence[TaskRole] | None = None


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The processes of one role: in a worker all workers, on the client the script alone.

    Args:
        tasks: The processes, by rank.
        rank: The number of this process among them.
        num_csx: The number of systems.
        num_workers_per_csx: The number of input workers of each system.
    """

    tasks: Sequence[TaskSpec]
    rank: int
    num_csx: int
    num_workers_per_csx: int

    def num_tasks(self) -> int:
        """Returns the number of processes."""
        return len(self.tasks)

    def task(self, rank: int | None = None) -> TaskSpec:
        """Returns a process.

        Args:
            rank: The number of the process; None: this one.
        """
        return self.tasks[self.rank if rank is None else rank]


class ClusterResolver:
    """The role and the peers of this process."""

    @property
    def task_role(self) -> TaskRole:
        """The role of this process."""
        return TaskRole.WORKER if streaming.is_streamer() else TaskRole.MASTER

    @property
    def num_tasks(self) -> int:
        """The number of processes that have its role."""
        return streaming.num_tasks()

    def assumes_role(self, role: TaskRole) -> bool:
        """Whether this process has the role.

        Args:
            role: The role.
        """
        return self.task_role is role

    def cluster_spec(self) -> ClusterSpec:
        """Returns the processes that have the role of this one. An input_fn that calls it is taken to shard."""
        per_csx, own = streaming.num_workers_per_csx(), streaming.get_streaming_rank()
        tasks = [
            TaskSpec(rank, rank % per_csx, rank // per_csx, socket.gethostname() if rank == own else "")
            for rank in range(streaming.num_tasks())
        ]
        return ClusterSpec(tasks, own, streaming.num_csx(), per_csx)


class BaseServiceResolver:
    """The resolver that `service_resolver` returns.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """

    @classmethod
    def get_resolver(cls) -> "BaseServiceResolver":
        """Returns the resolver of this process."""
        return cls()

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The role and the peers of this process."""
        return ClusterResolver()

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The processes that have the role of this one."""
        return self.cluster_resolver.cluster_spec()

    def streamer_ordinals(self) -> list[int]:
        """Returns the numbers of the processes that stream input."""
        return list(range(streaming.num_streamers()))

    def receiver_ordinals(self) -> list[int]:
        """Returns the numbers of the processes that receive output."""
        return list(range(streaming.num_receivers()))


def service_resolver() -> BaseServiceResolver:
    """Returns the resolver of this process, which has its role and its peers.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    return BaseServiceResolver.get_resolver()
