"""The backends of checked runs, in the place of the one that the script asks for."""

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cstorch._internal.backend.cpu import CpuBackend
from cstorch._internal.backend.csx import CsxBackend
from cstorch._internal.backend.current import Make, replace_backends
from cstorch._internal.backend.interface import Backend, BackendType, Cluster
from cstorch._internal.check.counted_random import CountedRandom
from cstorch._internal.check.run import CheckedRun, checked_run
from cstorch._internal.execution import Execution, Executor
from cstorch._internal.tracing import DEVICE, XlaName
from cstorch.distributed.cluster_config import ClusterConfig
from waferbox.checked_run.record import Way
from waferbox.launch.process import die_with_parent


def _on_one_wafer(config: ClusterConfig) -> ClusterConfig:
    """Returns the settings for one wafer of the cluster that the check has named in the environment."""
    return replace(config, mgmt_address=None, num_csx=1, num_workers_per_csx=1, max_wgt_servers=1)


class CheckedCsxBackend(CsxBackend):
    """The CSX backend of a checked run: one wafer of the check's own cluster, whatever the script asks for."""

    def __init__(self, run: CheckedRun, *args: Any, **settings: Any) -> None:
        self._run = run
        config = settings.get("cluster_config")
        self._asked_csx = config.num_csx if isinstance(config, ClusterConfig) else 1
        if isinstance(config, ClusterConfig):
            settings["cluster_config"] = _on_one_wafer(config)
        settings |= {"artifact_dir": run.folder / "cerebras_logs", "compile_only": False}
        settings["validate_only"] = run.settings.way is Way.TRACE
        super().__init__(**settings)

    def use_cluster(self, config: ClusterConfig) -> None:
        self._asked_csx = max(self._asked_csx, config.num_csx)
        super().use_cluster(_on_one_wafer(config))

    def make_execution(self, executor: Executor) -> Execution:
        from cstorch._internal.checked_backend.executions import CheckedFunctionExecution

        return CheckedFunctionExecution(executor, self.target()).checked_by(self._run, self._asked_csx)

    def make_loop_execution(self, executor: Executor) -> Execution:
        from cstorch._internal.checked_backend.executions import CheckedLoopExecution

        return CheckedLoopExecution(executor, self.target()).checked_by(self._run, self._asked_csx)


class CheckedEagerBackend(CpuBackend):
    """The CPU backend of a checked run, with the attributes of the CSX backend that scripts read."""

    stands_for_csx = True

    def __init__(self, run: CheckedRun, cluster_config: ClusterConfig | None) -> None:
        self._run = run
        self._random = CountedRandom()
        super().__init__(run.folder / "cerebras_logs")
        self._cluster = Cluster(cluster_config or ClusterConfig())

    @property
    def cluster_config(self) -> ClusterConfig:
        return self._cluster.config

    def make_execution(self, executor: Executor) -> Execution:
        from cstorch._internal.checked_backend.executions import CheckedEagerExecution

        return CheckedEagerExecution(executor, self._run, self._random)

    def make_loop_execution(self, executor: Executor) -> Execution:
        from cstorch._internal.checked_backend.executions import CheckedEagerLoop

        return CheckedEagerLoop(executor, self._run, self._random)


def _seed_generators() -> None:
    """Has a script without seeds draw the same numbers in all runs of a check."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def install_check() -> None:
    """Has the backends and files of this process made as a check wants them, if this is one of a check; called once."""
    run = checked_run()
    if run is None:
        return
    if os.getppid() == run.settings.parent:  # and not a process that the script has started
        die_with_parent(run.settings.parent)
    run.files.install()
    _seed_generators()

    def replacement(kind: BackendType, make: Make) -> Make:
        def made(
            artifact_dir: str | os.PathLike[str] | None = None,
            compile_dir: str | os.PathLike[str] | None = None,
            *args: Any,
            cluster_config: ClusterConfig | None = None,
            retrace_every_iteration: bool | None = None,
            **settings: Any,
        ) -> Backend:
            runs_on_cluster = run.settings.way in (Way.CLUSTER, Way.TRACE)
            if getattr(make, "device_is_xla", False):
                XlaName(DEVICE if runs_on_cluster else torch.device("cpu")).__enter__()  # for all of the process
            if runs_on_cluster:
                return CheckedCsxBackend(
                    run, cluster_config=cluster_config, retrace_every_iteration=retrace_every_iteration
                )
            return CheckedEagerBackend(run, cluster_config)

        return made if kind.is_csx else make

    replace_backends(replacement)
