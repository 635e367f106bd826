"""What happens to each ATen call that concerns the device (recorded, run at once, or refused), and the torch modes
that see to it.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.context import context
from cstorch._internal.tracing.device import known_values
from cstorch._internal.tracing.eager import run as run_eagerly
from cstorch._internal.tracing.operators import aten, moves_to_host, operator
from cstorch._internal.tracing.rewrites import decompositions, foreach
from cstorch._internal.tracing.rewrites.composites import recorded_function
from cstorch._internal.tracing.tensor import DEVICE, LazyTensor, is_device

# --- Decides what happens to each ATen call that concerns the device: recorded, run at once, or refused ---------------


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Called for every ATen operation that has a device tensor among its arguments or makes one."""
    if func is aten.is_pinned.default:
        return False
    if func is aten.native_batch_norm.default:
        func, args = _batch_norm(args)
    if func is aten.native_batch_norm_backward.default:
        args = _batch_norm_backward(args)
    if func is aten.polygamma_.default:  # whose schema torch's functionalisation does not know
        tensor, order = args
        func, args = aten.copy_.default, (tensor, torch.polygamma(order, tensor))
    if func in _STORAGE:
        return _other_storage(func, args)
    if foreach.applies(func):
        return foreach.run(func, args, kwargs)
    recorder = context.recorder
    if recorder is None:
        return run_eagerly(func, args, kwargs)
    if func is aten._is_all_true.default and recorder.known_value(args[0], None) is None:
        return torch.tensor(True)  # torch asks this only to raise an error: of what a distribution is given
    if operator(func).reads_values or moves_to_host(func, args, kwargs):
        return known_values.run(func, args, kwargs, recorder)
    if func in known_values.INDEXED:
        args = known_values.without_masks(func, args, recorder)
    if decompositions.applies(func):
        return decompositions.run(func, args, kwargs)
    return recorder.record(func, args, kwargs)


def _batch_norm(args: tuple[Any, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
    """The form of native_batch_norm whose schema says whether it writes to the running statistics."""
    tensor, weight, bias, mean, variance, training, momentum, epsilon = args
    if mean is None:
        return aten._native_batch_norm_legit.no_stats, (tensor, weight, bias, training, momentum, epsilon)
    given = (tensor, weight, bias, mean, variance)
    if not training:
        return aten._native_batch_norm_legit_no_training.default, (*given, momentum, epsilon)
    return aten._native_batch_norm_legit.default, (*given, training, momentum, epsilon)


def _batch_norm_backward(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient in training reads the saved statistics, in evaluation the running ones: the others are left out."""
    gradient, tensor, weight, mean, variance, saved_mean, saved_deviation, training, epsilon, mask = args
    statistics = (None, None, saved_mean, saved_deviation) if training else (mean, variance, None, None)
    return (gradient, tensor, weight, *statistics, training, epsilon, mask)


_STORAGE = frozenset({aten.set_.source_Tensor, aten.resize_.default, aten.resize_as_.default})


def _other_storage(func: OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    """Operations that give a tensor another storage: the one of another tensor, or a larger one."""
    tensor: torch.Tensor = args[0]
    other = args[1]
    if func is aten.set_.source_Tensor:
        tensor.data = other
    elif tuple(other.shape if isinstance(other, torch.Tensor) else other) != tuple(tensor.shape):
        raise messages.unsupported(func, "tensors on the device keep their sizes.")
    return tensor


# --- The torch modes that are active while a step is traced, or under `with backend.device` ---------------------------


_COMPOSITE = "CompositeImplicitAutograd"


class DeviceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what makes a device tensor without being given one: factories, and copies from the CPU."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch._dynamo, and each one goes through it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_device(kwargs.get("device")) or _has_device_tensor(args) or _has_device_tensor(kwargs.values()):
            # Autograd takes these apart, but inference mode leaves it out. Kernels in Python do not count: they come
            # with torch's decompositions, whenever somebody imports these.
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
                with self:
                    return func.decompose(*args, **kwargs)
            return dispatch(func, args, kwargs)
        result = func(*args, **kwargs)
        if context.recorder is not None:
            context.recorder.see_on_host(func, args, kwargs, result)
        return result


def _has_device_tensor(arguments: Any) -> bool:
    for argument in arguments:
        if isinstance(argument, LazyTensor):
            return True
        if isinstance(argument, (list, tuple)) and _has_device_tensor(argument):
            return True
    return False


class FunctionMode(TorchFunctionMode):
    """Knows which torch function the user called, for the error messages."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        context.functions.append(func)
        try:
            kwargs = kwargs or {}
            return recorded_function(func, [*args, *kwargs.values()])(*args, **kwargs)
        finally:
            context.functions.pop()


_autograd: Any = torch.autograd
_run_engine = _autograd._engine_run_backward


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """The backward pass, with what the script calls in it (hooks, autograd.Function, checkpoint) in FunctionMode too.

    torch handles `backward` and `grad` as functions of the mode, and has taken the mode away while it does.
    """
    is_active = any(isinstance(mode, FunctionMode) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    with contextlib.nullcontext() if is_active else FunctionMode():
        return _run_engine(*args, **kwargs)


@contextlib.contextmanager
def device_modes() -> Iterator[None]:
    """Makes operations that name the device, or mix CPU tensors in, reach `dispatch`."""
    # torch.tensor(x, device=...) then makes a CPU tensor and copies it, which the mode sees.
    before = torch._C._only_lift_cpu_tensors(), _autograd._engine_run_backward
    torch._C._set_only_lift_cpu_tensors(True)
    _autograd._engine_run_backward = _run_backward
    try:
        with FunctionMode(), DeviceMode():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before[0])
        _autograd._engine_run_backward = before[1]


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Says to whoever asks torch that a graph is being captured: such code reads no values to choose a way."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    # What torch.compile has wrapped runs as it is: the cluster has a compiler of its own.
    uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None
    try:
        with uncompiled or contextlib.nullcontext():
            yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


@contextlib.contextmanager
def device_scope() -> Iterator[torch.device]:
    """`with backend.device:` what is created within is on the device. Initialisation runs at once, on the CPU, with
    torch's default generator: the values are bitwise those of the same code without it."""
    with device_modes(), DEVICE:
        yield DEVICE
