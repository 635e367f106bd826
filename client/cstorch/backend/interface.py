"""What every backend has."""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

import torch

from cstorch.backend.cluster import Cluster
from cstorch.backend.device import Device
from cstorch.backend.kinds import BackendType
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.execution import Execution, Executor
from cstorch.tracing import is_in_body, is_tracing


class Backend(ABC):
    """What `backend` returns.

    Args:
        artifact_dir: folder for what an execution leaves behind.

    cluster: the cluster of a CSX backend.
    appliance: None: what it would tell, the operations that a wafer could do at most, is not known here.
    """

    backend_type: BackendType
    compile_only = False
    validate_only = False
    cluster: Cluster | None = None
    appliance: None = None

    def __init__(self, artifact_dir: Path) -> None:
        self.artifact_dir = artifact_dir
        self.device = Device(self.backend_type)

    @property
    def artifact_dir(self) -> Path:
        """The folder for what executions leave behind; another one counts for the next execution."""
        return self._artifact_dir

    @artifact_dir.setter
    def artifact_dir(self, folder: str | os.PathLike[str]) -> None:
        self._artifact_dir = Path(folder)

    @property
    def cluster_config(self) -> ClusterConfig | None:
        """The settings of the cluster; None without one."""
        return None

    @property
    def _impl(self) -> Self:
        """Itself: scripts of the real API know a backend and its implementation."""
        return self

    @property
    def torch_device(self) -> torch.device:
        """The device as torch knows it."""
        return self.device.torch_device

    @property
    def is_e2e_execution(self) -> bool:
        """Whether steps are run, not only compiled."""
        return not (self.compile_only or self.validate_only)

    @property
    def is_tracing(self) -> bool:
        """Whether a step's tensors have no numbers here: in a traced step, and on CSX in the body of a loop."""
        return is_tracing() or is_in_body()

    @property
    def is_cpu(self) -> bool:
        return self.backend_type.is_cpu

    @property
    def is_gpu(self) -> bool:
        return False

    @property
    def is_csx(self) -> bool:
        return self.backend_type.is_csx

    @abstractmethod
    def make_execution(self, executor: Executor) -> Execution:
        """What runs the steps of an executor."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the backend holds on a cluster."""
