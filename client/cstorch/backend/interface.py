"""What every backend has."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from cstorch.backend.device import Device
from cstorch.backend.kinds import BackendType
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.execution import Execution, Executor
from cstorch.tracing import is_tracing


class Backend(ABC):
    """What `backend` returns.

    Args:
        artifact_dir: folder for what an execution leaves behind.
    """

    backend_type: BackendType
    compile_only = False
    validate_only = False
    cluster_config: ClusterConfig | None = None

    def __init__(self, artifact_dir: Path) -> None:
        self.artifact_dir = artifact_dir
        self.device = Device(self.backend_type)

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
        """Whether a step is being traced."""
        return is_tracing()

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
