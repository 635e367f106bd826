"""What executions of a backend run on."""

from dataclasses import dataclass

from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.session.cluster_session import ClusterSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster, and how far an execution goes on it.

    config: as the script has it by now.
    session: with the cluster; None if the execution ends with the lowering.
    compile_only: whether it ends with the compile.
    """

    config: ClusterConfig
    session: ClusterSession | None
    compile_only: bool
