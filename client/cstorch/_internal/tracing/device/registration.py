"""Registers the device with torch: its kernels, its module `torch.lazy`, and its name in old releases."""

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Final

import torch
from torch._decomp import meta_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorConverter, UnsupportedFakeTensorException
from torch.overrides import TorchFunctionMode

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.context import context, is_tracing
from cstorch._internal.tracing.device.dispatch import dispatch
from cstorch._internal.tracing.operators import aten
from cstorch._internal.tracing.provenance import user_line
from cstorch._internal.tracing.rewrites.attention import attention
from cstorch._internal.tracing.step_values import check_known, outside_backward
from cstorch._internal.tracing.tensor import DEVICE, LazyTensor
from cstorch._internal.tracing.truncated_normal import replace_initialiser
from cstorch._internal.tracing.uninitialised import allow_on_device
from cstorch.errors import TraceError

logger = logging.getLogger("cstorch")

# --- Reference functions without dynamo -------------------------------------------------------------------------------
#
# torch's reference functions infer shapes on the meta device. A mark on them switches dynamo off, which imports dynamo
# first, in half a second. As long as dynamo is not imported, the mark is not needed.

_DYNAMO = "torch._dynamo"
_MARK = "__dynamo_disable"  # the attribute with the function that torch calls instead
_WRAPPER = torch._disable_dynamo(lambda: None).__code__  # type: ignore[attr-defined]


def import_dynamo_late() -> None:
    """Makes the marked functions run without their mark until dynamo is imported."""
    for wrapper in _wrappers():
        _run_until_imported(wrapper, _wrapped(wrapper))


def _wrappers() -> Iterator[FunctionType]:
    """Yields all functions for meta tensors, and all references, that would import dynamo."""
    references = (module for name, module in list(sys.modules.items()) if name.startswith("torch._refs"))
    candidates = [*meta_table.values(), *(value for module in references for value in vars(module).values())]
    for function in candidates:
        while isinstance(function, FunctionType):
            if function.__code__ is _WRAPPER:
                yield function
            function = _wrapped(function)


def _wrapped(function: FunctionType) -> Any:
    """Returns the function that a decorated function calls; None if there is none under torch's usual name."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["fn"].cell_contents if "fn" in cells else None


def _run_until_imported(wrapper: Callable[..., Any], function: FunctionType) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        if function.__dict__.get(_MARK) is run:
            del function.__dict__[_MARK]
        return wrapper(*args, **kwargs)

    function.__dict__.setdefault(_MARK, run)


# --- Kernels ----------------------------------------------------------------------------------------------------------
#
# Outside of the modes, these kernels serve all factories (`torch.zeros(3, device="lazy")`) and copies
# (`tensor.to("lazy")`). torch's device type `lazy` has no kernels, so they replace none.

_library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def _empty(size: Sequence[int], dtype: torch.dtype | None = None, **ignored: Any) -> Any:
    return dispatch(aten.empty.memory_format, (size,), {"dtype": dtype or torch.get_default_dtype(), "device": DEVICE})


def _empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None = None, *ignored: Any, **also_ignored: Any
) -> Any:
    kwargs = {"dtype": dtype or torch.get_default_dtype(), "device": DEVICE}
    return dispatch(aten.empty_strided.default, (size, stride), kwargs)


def _factory(operation: OpOverload) -> Callable[..., Any]:
    """Returns a kernel for a factory; torch's own would resize an empty tensor, which a device tensor cannot do."""
    return lambda *args, **kwargs: dispatch(operation, args, {**kwargs, "device": DEVICE})


_FACTORIES: Mapping[str, OpOverload] = {
    "arange": aten.arange.default,
    "arange.start": aten.arange.start,
    "arange.start_step": aten.arange.start_step,
    "eye": aten.eye.default,
    "eye.m": aten.eye.m,
    "randperm": aten.randperm.default,
    "randperm.generator": aten.randperm.generator,
}


def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> Any:
    return dispatch(aten.copy_.default, (destination, source), {})


def _draw_index(device: Any = None) -> torch.Tensor:
    """Returns the index of the next random operation of the traced step; empty outside of a step."""
    recorder = context.recorder
    return torch.tensor([] if recorder is None else [recorder.draws], dtype=torch.int64, device="cpu")


def _set_draw_index(state: torch.Tensor, device: Any = None) -> None:
    """Resets the index of the next random operation, so that a recomputation draws the same numbers."""
    recorder = context.recorder
    if recorder is not None and state.numel():
        recorder.draws = int(state[0])


def _module() -> types.ModuleType:
    """Returns the module `torch.lazy`, whose random state torch.utils.checkpoint saves and restores."""
    module = types.ModuleType("torch.lazy")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        device=lambda device: contextlib.nullcontext(),
        synchronize=lambda device=None: None,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=_draw_index,
        set_rng_state=_set_draw_index,
    )
    return module


@functools.cache
def warn_of_autocast() -> None:
    """Warns that autocast does not change a traced step; once, and not in mixed precision."""
    from cstorch.backends.mixed_precision import mixed_precision  # whose module imports this package

    if not mixed_precision():
        logger.warning(
            "At %s torch.autocast has no effect in a traced step, which computes in float32: with "
            "`cstorch.amp.enable_mixed_precision()` before cstorch.compile the compiler inserts casts",
            user_line(),
        )


def _register_autocast() -> None:
    """Makes `torch.autocast(tensor.device.type, ...)` have no effect: the compiler inserts the casts."""
    # torch has no autocast for this device type, and raises an error for its name even to switch it off.
    torch.set_autocast_dtype(DEVICE.type, torch.bfloat16)
    autocast_init: Callable[..., None] = torch.autocast.__init__

    @functools.wraps(autocast_init)
    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if enabled and (is_tracing() or device_type == DEVICE.type):
            warn_of_autocast()
        if device_type == DEVICE.type:
            device_type, dtype, enabled = "cpu", None, torch.is_autocast_enabled("cpu")
        autocast_init(self, device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    is_autocast_enabled: Callable[..., bool] = torch.is_autocast_enabled

    @functools.wraps(is_autocast_enabled)
    def is_enabled(*device_type: str) -> bool:
        return is_autocast_enabled(*("cpu" if name == DEVICE.type else name for name in device_type))

    torch.is_autocast_enabled = is_enabled  # type: ignore[assignment]


class ExportError(TraceError, UnsupportedFakeTensorException):
    """The error of a graph of device tensors; torch.compile takes it as the reason to run what it compiles as it is."""


def _refuse_fake_tensors() -> None:
    """Makes torch.export and torch.fx refuse device tensors by a message of Waferbox."""
    make_fake: Callable[..., Any] = FakeTensorConverter.from_real_tensor

    @functools.wraps(make_fake)
    def from_real_tensor(self: Any, mode: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, LazyTensor):
            raise ExportError(str(messages.exported()))
        return make_fake(self, mode, tensor, *args, **kwargs)

    FakeTensorConverter.from_real_tensor = from_real_tensor  # type: ignore[method-assign, assignment]


def register() -> None:
    """Registers the device with torch; called once per process, at import."""
    _register_autocast()
    import_dynamo_late()
    replace_initialiser()
    _refuse_fake_tensors()
    allow_on_device()
    LazyTensor._dispatch = staticmethod(dispatch)
    LazyTensor._check_known = staticmethod(check_known)
    LazyTensor._outside_backward = staticmethod(outside_backward)
    _library.impl("empty.memory_format", _empty, "Lazy")  # type: ignore[no-untyped-call]
    _library.impl("empty_strided", _empty_strided, "Lazy")  # type: ignore[no-untyped-call]
    for name, operation in _FACTORIES.items():
        _library.impl(name, _factory(operation), "Lazy")  # type: ignore[no-untyped-call]
    _library.impl("_copy_from", _copy_from, "Lazy")  # type: ignore[no-untyped-call]
    # A kernel, since a function mode would not see calls within other functions (nn.MultiheadAttention).
    _library.impl("scaled_dot_product_attention", attention, "AutogradLazy")  # type: ignore[no-untyped-call]
    if not hasattr(torch, DEVICE.type):
        torch._register_device_module(DEVICE.type, _module())  # type: ignore[no-untyped-call]


# --- The name of the device in releases before 1.9 --------------------------------------------------------------------


XLA = torch.device("xla")


_DEVICE_OF: Final = torch.Tensor.device.__get__


class XlaName(TorchFunctionMode):
    """The mode in which device tensors have a device of type `xla`, and torch takes `xla` for the device.

    Args:
        device: The device that has this name.
    """

    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__()
        self._device = device

    def __enter__(self) -> "XlaName":
        if self._device == DEVICE:
            LazyTensor.device = property(lambda _: XLA)  # type: ignore[assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._device == DEVICE:
            del LazyTensor.device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        own = {name: self._own(value) for name, value in (kwargs or {}).items()}
        result = func(*map(self._own, args), **own)
        return XLA if func == _DEVICE_OF and result == self._device else result

    def _own(self, argument: Any) -> Any:
        is_named = isinstance(argument, str | torch.device) and str(argument).partition(":")[0] == XLA.type
        return self._device if is_named else argument
