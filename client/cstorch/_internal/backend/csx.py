"""The CSX backend: steps run on a wafer-scale cluster."""

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from cstorch import backends
from cstorch._internal.artifacts import writes_in
from cstorch._internal.backend.interface import Backend, BackendType, Cluster
from cstorch._internal.backend.tracebacks import shorten_tracebacks
from cstorch._internal.execution import Execution, Executor, check_outside_of_loops
from cstorch._internal.imported_again import is_imported_again
from cstorch._internal.tracing import LazyTensor, is_tracing, purpose
from cstorch._internal.tracing.provenance import user_line, warn_user
from cstorch._internal.tracing.step_values import is_in_body
from cstorch._internal.tracing.tensor import keep_parameters
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    from cstorch._internal.session.cluster_session import ClusterSession, Target


class CsxBackend(Backend):
    """The backend that runs steps on a wafer-scale cluster.

    Args:
        artifact_dir: The folder for the files of executions; by default ./cerebras_logs.
        compile_dir: The folder of the cluster for compiled artifacts, below its cache root unless absolute; by default
            cached_compile.
        compile_only: Whether executions stop after the compile.
        validate_only: Whether executions stop after the lowering on the client.
        cluster_config: The cluster and its settings; by default the cs_config of the first executor.
        retrace_every_iteration: Sets the flag of this name, as in releases up to 2.2, whose executors name the cluster.

    device_is_xla: Whether the script calls the device `xla`.
    cluster: The cluster, with these settings and a workflow.
    """

    cluster: Cluster

    backend_type = BackendType.CSX
    device_is_xla: ClassVar[bool] = False

    def __init__(
        self,
        artifact_dir: str | os.PathLike[str] | None = None,
        compile_dir: str | os.PathLike[str] | None = None,
        compile_only: bool = False,
        validate_only: bool = False,
        cluster_config: ClusterConfig | None = None,
        retrace_every_iteration: bool | None = None,
    ) -> None:
        if compile_only and validate_only:
            raise ConfigurationError("compile_only and validate_only exclude each other: choose one")
        if cluster_config is not None and not isinstance(cluster_config, ClusterConfig):
            raise TypeError(
                f"cluster_config must be a cstorch.distributed.ClusterConfig, not {type(cluster_config).__name__}"
            )
        self.compile_only = compile_only
        self.validate_only = validate_only
        purpose.runs_steps = self.is_e2e_execution
        shorten_tracebacks()
        keep_parameters()
        _warn_of_steps_in_python()
        self.retrace_every_iteration = bool(retrace_every_iteration)
        folder = Path("cerebras_logs" if artifact_dir is None else artifact_dir)
        with writes_in(folder):  # The current folder may have been removed.
            folder = folder.absolute()
        super().__init__(folder)
        self.cluster = Cluster(cluster_config or ClusterConfig())
        self._is_chosen = cluster_config is not None
        self.compile_dir = os.fspath(compile_dir or "cached_compile")
        self._session: ClusterSession | None = None
        if retrace_every_iteration is not None:
            backends.csx.debug.retrace_every_iteration = self.retrace_every_iteration
        elif not is_imported_again():
            self.open_session()

    @property
    def cluster_config(self) -> ClusterConfig:
        """The settings of the cluster; a change has an effect from the next compile on."""
        return self.cluster.config

    @cluster_config.setter
    def cluster_config(self, config: ClusterConfig) -> None:
        self.cluster.config = config

    def open_session(self) -> None:
        """Begins the session with the cluster, which starts while the script builds its model."""
        if not self.validate_only:
            from cstorch._internal.session.embedded import LOG, EmbeddedCluster
            from cstorch._internal.session.management import find_management

            config = self.cluster_config
            cluster = find_management(config) or EmbeddedCluster(config, self.artifact_dir / LOG)
            # Imported after the start of the cluster, which imports torch meanwhile; in the function, since the
            # CPU backend needs no gRPC.
            from cstorch._internal.session.cluster_session import ClusterSession

            self._session = ClusterSession(config, self.compile_dir, cluster)

    def use_cluster(self, config: ClusterConfig) -> None:
        """Sets the cluster that an executor names.

        Raises:
            UsageError: Another cluster, or other settings of it, were set before.
        """
        if config != self.cluster_config:
            if self._is_chosen:
                raise UsageError(
                    "the settings of the cluster are global: num_csx, num_workers_per_csx and all else in cs_config "
                    "must be what the first executor was given, or what the backend was. Use another process for "
                    "other settings"
                )
            self._close_session()
            self.cluster_config = config
        self._is_chosen = True
        if self._session is None and not is_imported_again():
            self.open_session()

    def target(self) -> "Target":
        """Returns the target of executions."""
        from cstorch._internal.session.cluster_session import Target

        self.use_cluster(self.cluster_config)
        if self._session is None:  # one that was made while a spawned process imported the script
            self.open_session()
        assert self.validate_only or self._session is not None
        return Target(config=self.cluster_config, session=self._session, compile_only=self.compile_only)

    def make_execution(self, executor: Executor) -> Execution:
        from cstorch._internal.session.execution.function import FunctionExecution

        return FunctionExecution(executor, self.target())

    def make_loop_execution(self, executor: Executor) -> Execution:
        from cstorch._internal.session.execution.loop import LoopExecution

        return LoopExecution(executor, self.target())

    def release(self) -> None:
        check_outside_of_loops(
            "the backend cannot release its nodes inside the loop of an executor: release them after it"
        )
        if self._session is not None:
            self._session.end_left_execution()
            self._session.end_job()

    def close(self) -> None:
        purpose.runs_steps = True
        self._close_session()

    def _close_session(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.close()


@cache
def _warn_of_steps_in_python() -> None:
    """Warns, once, where an optimizer updates weights of the device outside of a step of an executor."""
    is_known = False

    def warn(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal is_known
        if is_known or is_tracing() or is_in_body():
            return
        if any(isinstance(weight, LazyTensor) for group in optimizer.param_groups for weight in group["params"]):
            is_known = True
            warn_user(
                f"at {user_line()} the optimizer steps in this process, not on the cluster: a cluster runs what a "
                "function with @cstorch.trace does, called once for each batch of a cstorch.utils.data.DataExecutor"
            )

    register_optimizer_step_post_hook(warn)
