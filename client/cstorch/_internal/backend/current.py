"""The backend of this process: at most one at a time, closed at exit."""

import atexit
import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import torch

from cstorch._internal import log, state
from cstorch._internal.backend.cpu import CpuBackend
from cstorch._internal.backend.csx import CsxBackend
from cstorch._internal.backend.interface import Backend, BackendType, Device
from cstorch._internal.execution import check_outside_of_loops, leave_loop
from cstorch._internal.imported_again import is_for_input
from cstorch._internal.tracing import random_counter
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.distributed.streaming import is_streamer
from cstorch.errors import UsageError

_CLASSES: dict[BackendType, type[CpuBackend] | type[CsxBackend]] = {
    BackendType.CPU: CpuBackend,
    BackendType.CSX: CsxBackend,
}

Make = Callable[..., Backend]

_replacement: Callable[[BackendType, Make], Make] | None = None
_current: Backend | None = None
_made_in = 0  # the process that has made it
_made_with: tuple[Any, ...] = ()
_making = threading.RLock()  # of the four above; two threads of a script may ask for a backend at once


# Settings are parameters here, so that a type checker finds misspelt names.
@overload
def backend(
    backend_type: Literal["CSX"],
    artifact_dir: str | os.PathLike[str] | None = None,
    compile_dir: str | os.PathLike[str] | None = None,
    compile_only: bool = False,
    validate_only: bool = False,
    cluster_config: ClusterConfig | None = None,
) -> CsxBackend: ...
@overload
def backend(
    backend_type: Literal["CPU"],
    artifact_dir: str | os.PathLike[str] = "./",
    mixed_precision: bool | None = None,
    *,
    cluster_config: ClusterConfig | None = None,
) -> CpuBackend: ...
@overload
def backend(
    backend_type: str | BackendType | None = None,
    artifact_dir: str | os.PathLike[str] = ...,
    *,
    compile_dir: str | os.PathLike[str] | None = None,
    compile_only: bool = False,
    validate_only: bool = False,
    cluster_config: ClusterConfig | None = None,
    mixed_precision: bool | None = None,
) -> Backend: ...
def backend(backend_type: str | BackendType | None = None, *args: Any, **settings: Any) -> Backend:
    """Makes the backend of this process, or returns it.

    Args:
        backend_type: "CSX" or "CPU", or a BackendType; None: the backend that there is.
        *args: Those of the backend: `artifact_dir`, and for CSX `compile_dir`, `compile_only`, `validate_only`.
        **settings: The same by name, and `cluster_config` for CSX, a `cstorch.distributed.ClusterConfig`.

    Returns:
        The backend.

    Raises:
        UsageError: There is another backend already, or none is there to return.
        ConfigurationError: The name or a setting is wrong.
        ClusterUnreachableError: No management service answers at the address of the cluster.

    Example:
        ::

            config = cstorch.distributed.ClusterConfig(num_csx=2)
            backend = cstorch.backend("CSX", cluster_config=config)

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if backend_type is None:
        if args or settings:
            raise UsageError('settings of a backend need its type: backend("CSX", ...)')
        return current_backend()
    kind = _kind(backend_type)
    if kind.is_cpu:
        settings.pop("cluster_config", None)
    return use_backend(kind, _CLASSES[kind], *args, **settings)


def _kind(backend_type: str | BackendType) -> BackendType:
    return backend_type if isinstance(backend_type, BackendType) else BackendType.from_str(backend_type)


def replace_backends(replacement: Callable[[BackendType, Make], Make]) -> None:
    """Has every backend made by another function: a checked run has backends of its own.

    Args:
        replacement: Returns the function to call for a type of backend, in the place of the one given.
    """
    global _replacement
    _replacement = replacement


def use_backend(kind: BackendType, make: Callable[..., Backend], *args: Any, **settings: Any) -> Backend:
    """Makes the backend of this process, or returns the one with the same settings; without settings, that of the kind.

    Raises:
        UsageError: There is another backend.
    """
    global _current, _made_in, _made_with
    with _making:
        if _current is not None:
            is_same_kind = _current.backend_type is kind or (kind.is_csx and _current.stands_for_csx)
            if is_same_kind and ((args, settings) == _made_with or not (args or settings)):
                return _current
            raise UsageError(
                f"this process has a {_current.backend_type.name} backend already, and a process has one: make it "
                "once, with all its settings, and get it with cstorch.backend(). For other settings, as in a notebook, "
                "close it first with cstorch.close_backend(), and make the model anew"
            )
        if not is_for_input():
            log.configure()
        _current = (make if _replacement is None else _replacement(kind, make))(*args, **settings)
        _made_in = os.getpid()
        _current.on_exit = functools.partial(_close_if_current, _current)
        _made_with = (args, settings)
        return _current


@overload
def current_backend(raise_exception: Literal[True] = True, raise_warning: bool = True) -> Backend: ...
@overload
def current_backend(raise_exception: bool, raise_warning: bool = True) -> Backend | None: ...
def current_backend(raise_exception: bool = True, raise_warning: bool = True) -> Backend | None:
    """Returns the backend of this process.

    Args:
        raise_exception: Whether to raise an error if there is none; otherwise the result is None.
        raise_warning: Has no effect: the name is not deprecated here.

    Raises:
        UsageError: There is no backend.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if _current is None and raise_exception:
        raise UsageError('there is no backend yet: begin with cstorch.backend("CSX") or cstorch.backend("CPU")')
    return _current


def current_backend_impl(raise_exception: bool = True) -> Backend | None:
    """Returns the backend of this process, under the name that some scripts import.

    Args:
        raise_exception: False: returns None if there is no backend.
    """
    return current_backend(raise_exception)


def has_backend() -> bool:
    """Whether this process has a backend."""
    return _current is not None


def close_backend() -> None:
    """Closes the backend, so that the process can have another one, and discards all state registered for it.

    The backend is also closed at exit.

    Raises:
        UsageError: The script is in the loop of an executor.
    """
    global _current
    check_outside_of_loops("the backend cannot be closed inside the loop of an executor")
    closing, _current = _current, None
    if closing is not None:
        state.clear()
        closing.close()
        random_counter.clear()


def _close_if_current(backend: Backend) -> None:
    if _current is backend:
        close_backend()


def get_backend_args(backend_type: str | BackendType) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a type of backend, by name.

    Args:
        backend_type: "CSX" or "CPU", or a BackendType.

    Raises:
        ConfigurationError: There is no such type.
    """
    return inspect.signature(_CLASSES[_kind(backend_type)].__init__).parameters


def device(backend_type: str | BackendType, *args: Any, **settings: Any) -> Device:
    """Returns the device of the backend; makes the backend if there is none.

    Args:
        backend_type: "CSX" or "CPU", or a BackendType.
        *args: As for `backend`.
        **settings: As for `backend`.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    return backend(backend_type, *args, **settings).device


def current_torch_device() -> torch.device:
    """Returns the torch device of the current backend; the CPU without a backend.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    return current_backend().torch_device if has_backend() else torch.device("cpu")


def use_cs() -> bool:
    """Whether steps run on a Cerebras system; in an input worker they do.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    return is_on_csx() or (_current is not None and _current.stands_for_csx)


def is_on_csx() -> bool:
    """Whether tensors of steps are on the device of a Cerebras system; in an input worker they count as such."""
    return is_streamer() or (_current is not None and _current.is_csx)


def _close_at_exit() -> None:
    closing = _current
    if closing is not None and _made_in == os.getpid():  # a forked process has not made it
        # A second Ctrl-C leaves no processes: they end when this process closes its end of their pipe.
        with contextlib.suppress(KeyboardInterrupt):
            try:
                # Here, since Python would end the iterator when modules are torn down.
                leave_loop(completes_step=False)
            finally:
                closing.close()


atexit.register(_close_at_exit)
