"""Operands of ATen calls that concern the device: on which device they are, and as meta tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch.tracing.operators import aten
from cstorch.tracing.tensors.cell import Cell
from cstorch.tracing.tensors.tensor import DEVICE, META, LazyTensor

# Operations that may be given a CPU tensor with dimensions beside device tensors.
TAKES_CPU_TENSORS = frozenset(
    {aten._to_copy.default, aten.copy_.default, aten.lift_fresh.default, aten.index.Tensor, aten.index_put_.default}
    | {aten.index_put.default, aten._index_put_impl_.default}
)


def as_meta(argument: Any) -> Any:
    """The argument as the meta kernel gets it."""
    if isinstance(argument, LazyTensor):
        return argument._handle.meta
    if isinstance(argument, torch.Tensor):
        return argument.to(META)
    if isinstance(argument, (list, tuple)):
        return [as_meta(item) for item in argument]
    if isinstance(argument, torch.device):
        return META
    if isinstance(argument, torch.Generator):
        return None
    return argument


def is_whole(meta: torch.Tensor, cell: Cell) -> bool:
    """True for a tensor that is the whole cell, as it is."""
    return tuple(meta.shape) == cell.shape and meta.is_contiguous() and meta.storage_offset() == 0


def moves_to_host(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True for a copy from the device to the host: `.to("cpu")`, or `copy_` into a CPU tensor."""
    if func is aten._to_copy.default:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type != DEVICE.type
    return func is aten.copy_.default and not isinstance(args[0], LazyTensor)
