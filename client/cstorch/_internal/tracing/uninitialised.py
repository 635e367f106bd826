"""Parameters and buffers that get their shape from a first call (nn.LazyLinear): on the CPU until then."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import (  # type: ignore[attr-defined]  # the stubs lack one
    UninitializedBuffer,
    UninitializedParameter,
    UninitializedTensorMixin,
)

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.context import is_tracing
from cstorch._internal.tracing.tensor import from_cpu, is_device, moved

_CPU = torch.device("cpu")
# The attribute of an uninitialised tensor that is to be on the device. It cannot be there: it has a class of its own.
_MARK = "_is_for_cerebras"


def allow_on_device() -> None:
    """Makes uninitialised tensors that are to be on the device come there when they get their shape."""
    for kind in (UninitializedParameter, UninitializedBuffer):
        kind.__new__ = _making(kind.__new__)  # type: ignore[method-assign]
    mixin: Any = UninitializedTensorMixin
    mixin.materialize = _materializing(mixin.materialize)
    mixin.to = _to


def _making(make: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def new(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        device = given.arguments.get("device")
        is_for_device = is_device(torch.get_default_device() if device is None else device)
        if is_for_device:
            given.arguments["device"] = _CPU
        tensor = make(*given.args, **given.kwargs)
        setattr(tensor, _MARK, is_for_device)
        return tensor

    return new


def _materializing(materialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(materialize)
    def on_device(self: Any, shape: Any, device: Any = None, dtype: torch.dtype | None = None) -> None:
        if not (getattr(self, _MARK, False) if device is None else is_device(device)):
            return materialize(self, shape, device, dtype)
        if is_tracing():
            raise messages.uninitialised()
        materialize(self, shape, _CPU, dtype)
        torch.utils.swap_tensors(self, moved(self, from_cpu))  # type: ignore[no-untyped-call]

    return on_device


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to`, which moves to the device later."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    is_for_device = getattr(self, _MARK, False) if device is None else is_device(device)
    changed = torch.Tensor.to(self, _CPU if is_for_device else device, dtype or self.dtype)
    for tensor in (self, changed):  # a module keeps the one or the other
        setattr(tensor, _MARK, is_for_device)
    return changed
