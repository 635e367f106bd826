"""Dispatch of each ATen call with device tensors (recorded, run at once, or refused), and the torch modes for it."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from cstorch._internal.tracing import messages, wrong_operands
from cstorch._internal.tracing.context import context
from cstorch._internal.tracing.device import host_factories, known_values
from cstorch._internal.tracing.eager import run as run_eagerly
from cstorch._internal.tracing.operators import aten, moves_to_host, operator
from cstorch._internal.tracing.rewrites import control_flow, decompositions, foreach
from cstorch._internal.tracing.rewrites.composites import recorded_function
from cstorch._internal.tracing.tensor import DEVICE, LazyTensor, is_device


def dispatch(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs or records an ATen call that takes or makes device tensors."""
    if func is aten.is_pinned.default:
        return False
    if func is aten.native_batch_norm.default:
        func, args = _batch_norm(args)
    if func is aten.native_batch_norm_backward.default:
        args = _batch_norm_backward(args)
    if func is aten.polygamma_.default:  # torch's functionalisation lacks its schema
        tensor, order = args
        func, args = aten.copy_.default, (tensor, torch.polygamma(order, tensor))
    if func in _STORAGE:
        return _other_storage(func, args)
    op = operator(func)
    if op.layout is not torch.strided:
        raise messages.other_layout(op.name, op.layout)
    if foreach.applies(func):
        return foreach.run(func, args, kwargs)
    if host_factories.applies(func, args, kwargs):
        return host_factories.run(func, args, kwargs)
    recorder = context.recorder
    if recorder is None:
        return run_eagerly(func, args, kwargs)
    if func is aten._is_all_true.default and recorder.known_value(args[0], None) is None:
        return torch.tensor(True)  # torch uses it only to check the arguments of a distribution
    if func is aten._linalg_check_errors.default:
        return recorder.check_errors_of(args[0])
    if op.reads_values or moves_to_host(func, args, kwargs):
        return known_values.run(func, args, kwargs, recorder)
    if func in known_values.INDEXED:
        args = known_values.without_masks(func, args, recorder)
    if decompositions.applies(func):
        return decompositions.run(func, args, kwargs)
    if (function := decompositions.function_of_script(func)) is not None:
        with _in_function_mode(), DeviceMode():  # type: ignore[no-untyped-call]
            return function(*args, **kwargs)
    return recorder.record(func, args, kwargs)


def _batch_norm(args: tuple[Any, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
    """Returns the form of native_batch_norm whose schema shows whether it writes to the running statistics."""
    tensor, weight, bias, mean, variance, training, momentum, epsilon = args
    if mean is None:
        return aten._native_batch_norm_legit.no_stats, (tensor, weight, bias, training, momentum, epsilon)
    given = (tensor, weight, bias, mean, variance)
    if not training:
        return aten._native_batch_norm_legit_no_training.default, (*given, momentum, epsilon)
    return aten._native_batch_norm_legit.default, (*given, training, momentum, epsilon)


def _batch_norm_backward(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments without the statistics that are not read: running ones in training, saved ones else."""
    gradient, tensor, weight, mean, variance, saved_mean, saved_deviation, training, epsilon, mask = args
    statistics = (None, None, saved_mean, saved_deviation) if training else (mean, variance, None, None)
    return (gradient, tensor, weight, *statistics, training, epsilon, mask)


_STORAGE = frozenset({aten.set_.source_Tensor, aten.resize_.default, aten.resize_as_.default})


def _other_storage(func: OpOverload, args: tuple[Any, ...]) -> torch.Tensor:
    """Runs an operation that gives a tensor another storage; raises TraceError if its size would change."""
    tensor: torch.Tensor = args[0]
    other = args[1]
    if func is aten.set_.source_Tensor:
        tensor.data = other
    elif tuple(other.shape if isinstance(other, torch.Tensor) else other) != tuple(tensor.shape):
        raise messages.unsupported(
            func,
            "tensors on the device keep their sizes. What gets its size from the first call, such as the statistics of "
            "an observer, gets it from a call of the model on the CPU before cstorch.compile.",
        )
    return tensor


# --- Modes of torch ---------------------------------------------------------------------------------------------------

_COMPOSITE = "CompositeImplicitAutograd"


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base of all modes here: one that torch.compile does not look into."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo, and pass each call through it


class DeviceMode(DispatchMode):  # type: ignore[no-untyped-call]
    """The mode that dispatches calls that make device tensors without taking one: factories, copies from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_device(kwargs.get("device")) or _has_device_tensor(args) or _has_device_tensor(kwargs.values()):
            # Composite operations, which autograd decomposes, and inference mode does not. Only kernels in C++ count:
            # those in Python exist as soon as any code imports torch's decompositions.
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE):
                with self:
                    return func.decompose(*args, **kwargs)
            return dispatch(func, args, kwargs)
        result = func(*args, **kwargs)
        if context.recorder is not None:
            context.recorder.record_host_call(func, args, kwargs, result)
        return result


def _has_device_tensor(arguments: Any) -> bool:
    for argument in arguments:
        if isinstance(argument, LazyTensor):
            return True
        if isinstance(argument, (list, tuple)) and _has_device_tensor(argument):
            return True
    return False


# The functions of torch that are written in Python, by the namespace and the name under which they are called.
_OWN: Final = {
    (namespace, name): function
    for namespace in (torch.nn.functional, torch.functional, torch, torch.Tensor)
    for name, function in vars(namespace).items()
    if isinstance(function, FunctionType)
}
_OWN_FUNCTIONS: Final = frozenset(_OWN.values())


def _original(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of torch in whose place a script has put one of its own, which calls it.

    torch looks its function up by name when it asks a mode, and so finds the script's, which runs already.
    """
    if not isinstance(func, FunctionType) or func in _OWN_FUNCTIONS:
        return func
    places = (own for (namespace, name), own in _OWN.items() if getattr(namespace, name, None) is func)
    return next(places, func)


class FunctionMode(TorchFunctionMode):
    """The mode that records the torch functions that the user calls, and replaces some of them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = _original(func)
        context.functions.append(func)
        try:
            kwargs = kwargs or {}
            if isinstance(func, HigherOrderOperator) and context.recorder is not None:
                with _in_function_mode():
                    return control_flow.run(func, args, kwargs)
            if context.recorder is not None:
                wrong_operands.check(func, args, kwargs)
            return recorded_function(func, [*args, *kwargs.values()])(*args, **kwargs)
        except (RuntimeError, ValueError, AssertionError) as error:
            explained = None if context.recorder is None else wrong_operands.explained(func, args, kwargs or {}, error)
            if explained is None:
                raise
            raise explained.with_traceback(error.__traceback__) from None
        finally:
            context.functions.pop()


_autograd: Any = torch.autograd
_run_engine = _autograd._engine_run_backward


_hooks: Any = torch._C._autograd
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks


def _in_function_mode() -> contextlib.AbstractContextManager[Any]:
    """The context for functions of the script that a function of torch calls, for which torch disables the mode."""
    is_active = any(isinstance(mode, FunctionMode) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return contextlib.nullcontext() if is_active else FunctionMode()


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """Runs the backward pass in FunctionMode, for the functions of the script in it (hooks, autograd.Function)."""
    with _in_function_mode():
        return _run_engine(*args, **kwargs)


def _push_saved_tensors_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Enters torch.autograd.graph.saved_tensors_hooks, whose `pack` is called within functions of torch."""

    def packed(tensor: torch.Tensor) -> Any:
        with _in_function_mode():
            return pack(tensor)

    _push_hooks(packed, unpack)


@contextlib.contextmanager
def device_modes() -> Iterator[None]:
    """Context in which calls that name the device, or mix in CPU tensors, reach `dispatch`."""
    # With it torch.tensor(x, device=...) makes a CPU tensor and copies it, and the mode gets the copy.
    before = torch._C._only_lift_cpu_tensors(), _autograd._engine_run_backward
    pushed = _hooks._push_saved_tensors_default_hooks
    torch._C._set_only_lift_cpu_tensors(True)
    _autograd._engine_run_backward = _run_backward
    _hooks._push_saved_tensors_default_hooks = _push_saved_tensors_hooks
    try:
        with FunctionMode(), DeviceMode():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before[0])
        _autograd._engine_run_backward = before[1]
        _hooks._push_saved_tensors_default_hooks = pushed


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """Context in which torch reports that a graph is captured, so that libraries read no values to branch on."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    # Functions wrapped by torch.compile run uncompiled: the cluster has its own compiler.
    uncompiled = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None
    try:
        with uncompiled or contextlib.nullcontext():
            yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


@contextlib.contextmanager
def device_scope() -> Iterator[torch.device]:
    """The context `with backend.device:`, in which new tensors are on the device.

    Their values are bitwise those of the same code without the context: random numbers come from torch's default
    generator.
    """
    with device_modes(), DEVICE:
        yield DEVICE
