"""Operations that make a tensor on another device, such as the CPU, without the values of a device tensor."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing.context import context
from cstorch._internal.tracing.operators import LIKE, aten, moves_to_host
from cstorch._internal.tracing.tensor import META, LazyTensor


def applies(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call makes a tensor on another device, and reads only the shape and the type of a device tensor."""
    if not moves_to_host(func, args, kwargs):
        return False
    return func in LIKE or (func is aten._to_copy.default and torch.device(kwargs["device"]) == META)


def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Makes the tensor, in a traced step too, where it is like any other tensor of the host."""
    metas = tuple(argument._handle.meta if isinstance(argument, LazyTensor) else argument for argument in args)
    result = func(*metas, **kwargs)
    if context.recorder is not None:
        context.recorder.record_host_call(func, metas, kwargs, result)
    return result
