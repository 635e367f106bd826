"""backend("CSX" | "CPU"): where the steps of this process run. There is one per process."""

import atexit
import contextlib
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch

from cstorch import backends, log, state
from cstorch.cluster_config import ClusterConfig
from cstorch.distributed import is_streamer
from cstorch.errors import ConfigurationError, UsageError
from cstorch.execution import CpuExecution, Execution, current_execution
from cstorch.tracing import DEVICE, device_scope, is_tracing, laziness, random_counter

if TYPE_CHECKING:
    from cstorch.session.session import Session
    from cstorch.utils.data.executor import DataExecutor


class BackendType(Enum):
    """The kinds of backends."""

    CPU = "CPU"
    CSX = "CSX"

    @classmethod
    def from_str(cls, name: str) -> "BackendType":
        """The backend type of this name, in any case.

        Raises:
            ConfigurationError: there is none.
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
    def is_csx(self) -> bool:
        return self is BackendType.CSX


class DeviceConfig:
    """Settings of a device, as in releases 2.0 and 2.1; later ones have `cstorch.backends.csx.debug`."""

    __slots__ = ()

    def __init__(self) -> None:
        laziness.refuses_aliases = False

    @property
    def lazy_initialization(self) -> bool:
        """Whether initialisation is traced, and run by the cluster while the step is compiled.

        Setting it to True also refuses explicit aliases of weights in the forward pass, as those releases do.
        """
        return backends.csx.debug.lazy_initialization

    @lazy_initialization.setter
    def lazy_initialization(self, enabled: bool) -> None:
        backends.csx.debug.lazy_initialization = laziness.refuses_aliases = enabled


class Device:
    """The device of a backend; `with backend.device:` makes what is created within on the device."""

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

    def __repr__(self) -> str:
        return f"Device({self.backend_type.name})"


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
    def make_execution(self, executor: "DataExecutor") -> Execution:
        """What runs the steps of an executor."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the backend holds on a cluster."""


class CpuBackend(Backend):
    """Runs steps eagerly on the CPU, without any cluster. Dropout and the like draw from torch's own generator: other
    numbers than the cluster's, which come from a counter."""

    backend_type = BackendType.CPU

    def __init__(self, artifact_dir: str | os.PathLike[str] = "./") -> None:
        super().__init__(Path(artifact_dir))

    def make_execution(self, executor: "DataExecutor") -> Execution:
        return CpuExecution(executor)

    def close(self) -> None:
        pass


class CsxBackend(Backend):
    """Runs steps on a wafer-scale cluster.

    Args:
        artifact_dir: folder for what an execution leaves behind; by default ./cerebras_logs.
        compile_dir: where the cluster keeps compiled artifacts, below its cache root unless absolute.
        compile_only: stop after the compile.
        validate_only: stop after the lowering on the client.
        cluster_config: which cluster, and what of it.
    """

    backend_type = BackendType.CSX

    def __init__(
        self,
        artifact_dir: str | os.PathLike[str] | None = None,
        compile_dir: str | os.PathLike[str] = "cached_compile",
        compile_only: bool = False,
        validate_only: bool = False,
        cluster_config: ClusterConfig | None = None,
    ) -> None:
        if compile_only and validate_only:
            raise ConfigurationError("compile_only and validate_only exclude each other: choose one")
        if cluster_config is not None and not isinstance(cluster_config, ClusterConfig):
            raise TypeError(
                f"cluster_config must be a cstorch.distributed.ClusterConfig, not {type(cluster_config).__name__}"
            )
        self.compile_only = compile_only
        self.validate_only = validate_only
        super().__init__(Path.cwd() / "cerebras_logs" if artifact_dir is None else Path(artifact_dir))
        self.cluster_config: ClusterConfig = cluster_config or ClusterConfig()
        self._compile_dir = os.fspath(compile_dir)
        self._session: Session | None = None
        self.open_session()

    def open_session(self) -> None:
        """Begins the session with the cluster, which comes up while the script builds its model."""
        if not self.validate_only:
            from cstorch.session import session  # gRPC is not needed by who runs on the CPU

            self._session = session.Session(self.cluster_config, self._compile_dir, self.artifact_dir)

    @property
    def session(self) -> "Session":
        """The session with the cluster; there is none with validate_only."""
        assert self._session is not None
        return self._session

    def make_execution(self, executor: "DataExecutor") -> Execution:
        from cstorch.session.execution import CsxExecution

        return CsxExecution(executor, self)

    def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.close()


_CLASSES: dict[BackendType, type[CpuBackend] | type[CsxBackend]] = {
    BackendType.CPU: CpuBackend,
    BackendType.CSX: CsxBackend,
}

_current: Backend | None = None
_made_with: tuple[Any, ...] = ()


@overload
def backend(backend_type: Literal["CSX"], **settings: Any) -> CsxBackend: ...
@overload
def backend(backend_type: str | None = None, *args: Any, **settings: Any) -> Backend: ...
def backend(backend_type: str | None = None, *args: Any, **settings: Any) -> Backend:
    """Makes the backend of this process, or returns it.

    Args:
        backend_type: "CSX" or "CPU"; None asks for the backend that there is.
        *args, **settings: those of CsxBackend or CpuBackend.

    Raises:
        UsageError: there is another backend already, or none is there to return.
        ConfigurationError: the name or a setting is wrong.
    """
    if backend_type is None:
        if args or settings:
            raise UsageError('settings of a backend need its type: backend("CSX", ...)')
        return current_backend()
    kind = BackendType.from_str(backend_type)
    return use_backend(kind, _CLASSES[kind], *args, **settings)


def use_backend(kind: BackendType, make: Callable[..., Backend], *args: Any, **settings: Any) -> Backend:
    """Makes the backend of this process with `make`, or returns the one that was made with the same settings, or, if
    none are given, the one of this kind.

    Raises:
        UsageError: there is another backend already.
    """
    global _current, _made_with
    if _current is not None:
        if _current.backend_type is kind and ((args, settings) == _made_with or not (args or settings)):
            return _current
        raise UsageError(
            f"this process has a {_current.backend_type.name} backend already, and a process has one: make it once, "
            "with all its settings, and get it with cstorch.backend()"
        )
    log.configure()
    _current = make(*args, **settings)
    _made_with = (args, settings)
    return _current


@overload
def current_backend(raise_exception: Literal[True] = True, raise_warning: bool = True) -> Backend: ...
@overload
def current_backend(raise_exception: bool, raise_warning: bool = True) -> Backend | None: ...
def current_backend(raise_exception: bool = True, raise_warning: bool = True) -> Backend | None:
    """The backend of this process.

    Args:
        raise_exception: False for None where there is none.
        raise_warning: of no effect: the name is not deprecated here.

    Raises:
        UsageError: there is none yet.
    """
    if _current is None and raise_exception:
        raise UsageError('there is no backend yet: begin with cstorch.backend("CSX") or cstorch.backend("CPU")')
    return _current


def current_backend_impl(raise_exception: bool = True) -> Backend | None:
    """The same, under the name that some scripts import it by."""
    return current_backend(raise_exception)


def has_backend() -> bool:
    """Whether this process has a backend."""
    return _current is not None


def close_backend() -> None:
    """Closes the backend, so that the process can have another one; what was compiled for it is forgotten.

    At exit the backend is closed by itself.
    """
    global _current
    if current_execution() is not None:
        raise UsageError("the backend cannot be closed inside the loop of an executor")
    closing, _current = _current, None
    if closing is not None:
        state.clear()
        closing.close()
        random_counter.clear()


def get_backend_args(backend_type: str | BackendType) -> Mapping[str, inspect.Parameter]:
    """The parameters of a type of backend, by name.

    Raises:
        ConfigurationError: there is no such type.
    """
    kind = backend_type if isinstance(backend_type, BackendType) else BackendType.from_str(backend_type)
    return inspect.signature((CsxBackend if kind.is_csx else CpuBackend).__init__).parameters


def device(backend_type: str, *args: Any, **settings: Any) -> Device:
    """The device of the backend; makes the backend if there is none."""
    return backend(backend_type, *args, **settings).device


def current_torch_device() -> torch.device:
    """The torch device of the current backend."""
    return current_backend().torch_device


def use_cs() -> bool:
    """Whether steps run on a Cerebras system; in an input worker they do."""
    return is_streamer() or (_current is not None and _current.is_csx)


def _close_at_exit() -> None:
    closing = _current
    if closing is not None:
        # A second Ctrl-C must not leave processes behind: they end by themselves when our end of their pipe closes.
        with contextlib.suppress(KeyboardInterrupt):
            closing.close()


atexit.register(_close_at_exit)
