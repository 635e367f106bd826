"""The base class of backends, with the kind, the device and the cluster of a backend."""

import logging
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from cstorch import backends
from cstorch._internal.execution import Execution, Executor, current_execution, leave_loop
from cstorch._internal.tracing import DEVICE, alias_rule, device_scope, is_in_body, is_tracing
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ConfigurationError


class BackendType(Enum):
    """The kinds of backends."""

    CPU = "CPU"
    CSX = "CSX"

    @classmethod
    def from_str(cls, name: str) -> "BackendType":
        """Returns the backend type of this name, in any case.

        Args:
            name: "CSX" or "CPU".

        Raises:
            ConfigurationError: There is none.
        """
        if name.upper() == "GPU":
            raise ConfigurationError('Waferbox has no GPU backend: use "CPU", or "CSX" for a cluster')
        try:
            return cls[name.upper()]
        except KeyError:
            raise ConfigurationError(f"unknown backend {name!r}: use one of {', '.join(cls.__members__)}") from None

    @property
    def is_cpu(self) -> bool:
        return self is BackendType.CPU

    @property
    def is_gpu(self) -> bool:
        return False

    @property
    def is_csx(self) -> bool:
        return self is BackendType.CSX


# --- The device -------------------------------------------------------------------------------------------------------


class DeviceConfig:
    """Settings of a device, as in releases 2.0 and 2.1; later ones have `cstorch.backends.csx.debug`."""

    __slots__ = ()

    def __init__(self) -> None:
        alias_rule.refuses_explicit = False

    @property
    def lazy_initialization(self) -> bool:
        """Whether initialisation is traced, and run by the cluster while the step is compiled.

        Setting it to True also refuses explicit aliases of weights in the forward pass, as those releases do.
        """
        return backends.csx.debug.lazy_initialization

    @lazy_initialization.setter
    def lazy_initialization(self, enabled: bool) -> None:
        backends.csx.debug.lazy_initialization = alias_rule.refuses_explicit = enabled

    @property
    def drop_data(self) -> bool:
        """As `cstorch.backends.csx.debug.drop_data`."""
        return backends.csx.debug.drop_data

    @drop_data.setter
    def drop_data(self, enabled: bool) -> None:
        backends.csx.debug.drop_data = enabled


class Device:
    """The device of a backend, and the context in which new tensors are on it."""

    def __init__(self, backend_type: BackendType) -> None:
        self.backend_type = backend_type
        self.config = DeviceConfig()
        self.torch_device = DEVICE if backend_type.is_csx else torch.device("cpu")
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Self:
        stack = ExitStack()
        stack.enter_context(device_scope() if self.backend_type.is_csx else self.torch_device)
        self._entered.append(stack)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def __str__(self) -> str:
        return self.backend_type.name

    def __repr__(self) -> str:
        return f"Device({self.backend_type.name})"


# --- The cluster of a CSX backend -------------------------------------------------------------------------------------

logger = logging.getLogger("cstorch")


class ManagementClient:
    """The type of `Cluster.client`. workflow_id: the identifier of the present workflow; None without one."""

    def __init__(self, workflow_id: Callable[[], str | None]) -> None:
        self._workflow_id = workflow_id

    @property
    def workflow_id(self) -> str | None:
        return self._workflow_id()

    def list_workflow_jobs(self) -> tuple[list[str], list[str]]:
        """Returns the names of compile jobs and of execute jobs: none, as jobs are not recorded by workflow."""
        return [], []


class Cluster:
    """The cluster of a backend: its settings, and the workflow of its jobs.

    config: The settings; a change has an effect from the next compile on.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.client = ManagementClient(lambda: self.workflow_id)

    @property
    def config(self) -> ClusterConfig:
        return self._config

    @config.setter
    def config(self, config: ClusterConfig) -> None:
        if not isinstance(config, ClusterConfig):
            raise TypeError(f"config must be a cstorch.distributed.ClusterConfig, not {type(config).__name__}")
        if config.workflow_id is None:
            config.workflow_id = self.workflow_id
        self._config = config

    @property
    def workflow_id(self) -> str | None:
        """The workflow's name; None without one."""
        return self._config.workflow_id

    def start_workflow(self, lock_resources: bool = True) -> bool:
        """Begins a workflow: a name for all that the script runs from now on.

        Args:
            lock_resources: Has no effect: a script keeps its one job and the job's nodes in any case.

        Returns:
            Whether a workflow began; False if there was one.
        """
        if self.workflow_id is not None:
            logger.info("The workflow %s is under way already", self.workflow_id)
            return False
        self._config.workflow_id = f"wflow-{uuid.uuid4().hex[:12]}"
        logger.info("Began the workflow %s", self.workflow_id)
        return True

    def stop_workflow(self) -> None:
        """Ends the workflow."""
        self._config.workflow_id = None

    def check_storage_connectivity(self) -> bool:
        """Returns False: checkpoints are files of the client, which the cluster does not access."""
        return False

    def active_resources(self) -> int | None:
        """Returns None: the number of working wafers of a workflow is not known."""
        return None


# --- The backend ------------------------------------------------------------------------------------------------------


class Backend(ABC):
    """A backend, which runs the steps of executors.

    Args:
        artifact_dir: The folder for the files of executions.

    cluster: The cluster of a CSX backend; None for others.
    appliance: None: the peak performance of a wafer, which the real system has here, is not known.
    stands_for_csx: Whether scripts are to do what they do on a CSX backend, though steps run elsewhere.
    """

    backend_type: BackendType
    stands_for_csx = False
    compile_only = False
    validate_only = False
    cluster: Cluster | None = None
    appliance: None = None

    def __init__(self, artifact_dir: Path) -> None:
        self.artifact_dir = artifact_dir
        self.device = Device(self.backend_type)
        self.on_exit: Callable[[], None] = self.close  # at the end of a `with` block
        self._around: Execution | None = None  # the execution whose loop has the `with` block

    @property
    def artifact_dir(self) -> Path:
        """The folder for the files of executions; a change has an effect from the next execution on."""
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
        """The backend itself: scripts of the real API have a backend and its implementation."""
        return self

    @property
    def torch_device(self) -> torch.device:
        """The device of torch."""
        return self.device.torch_device

    @property
    def is_e2e_execution(self) -> bool:
        """Whether steps are run, not only compiled."""
        return not (self.compile_only or self.validate_only)

    @property
    def is_tracing(self) -> bool:
        """Whether tensors of a step have no known values: in a traced step, and on CSX in the body of a loop."""
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
        """Returns the execution that runs the steps of an executor.

        Args:
            executor: The executor.
        """

    def make_loop_execution(self, executor: Executor) -> Execution:
        """Returns the execution that runs the steps of an executor, each of which is the body of the script's loop.

        Args:
            executor: The executor.
        """
        return self.make_execution(executor)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Returns the context in which a compiled model computes its forward pass."""
        return nullcontext()

    @abstractmethod
    def release(self) -> None:
        """Returns the nodes that the backend has of its cluster, so that other jobs can have them. (Waferbox only.)

        The script keeps its states, which come to this process first. The next execution takes nodes again, and begins
        with these states. A CPU backend has nothing to return.

        Raises:
            UsageError: The script is in the loop of an executor.
            ClusterError: The cluster failed, and some of the states with it.

        Example:
            ::

                for batch in executor:
                    training_step(batch)
                backend.release()  # the notebook stays open; its wafers are free for others
        """

    def __enter__(self) -> Self:
        """Returns the backend; the end of the block closes it, as `cstorch.close_backend` does. (Waferbox only.)"""
        self._around = current_execution()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if current_execution() is not self._around:  # the script keeps an iterator of the block
                leave_loop(completes_step=exception[0] is None)
        finally:
            self.on_exit()

    @abstractmethod
    def close(self) -> None:
        """Frees the resources of the backend on its cluster."""
