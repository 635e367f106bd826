"""Operations that read values, on tensors whose values are known while the step is traced."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.context import StepRecorder, refuse
from cstorch._internal.tracing.operators import aten, moves_to_host
from cstorch._internal.tracing.tensor import DEVICE, LazyTensor


def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], recorder: StepRecorder) -> Any:
    """Runs an operation that reads values on the CPU. Its results become constants of the step, or stay on the host.

    Raises:
        TraceError: The value of an operand is not known.
    """
    refusal = messages.value_read(func)

    def value(tensor: LazyTensor) -> torch.Tensor:
        known = recorder.known_value(tensor, refusal)
        if known is not None:
            return known
        refuse(refusal)
        # All rows are kept of those that a mask would choose.
        make = torch.ones if torch.Tag.dynamic_output_shape in func.tags else torch.zeros
        return make(tensor.shape, dtype=tensor.dtype, device="cpu")

    to_host = moves_to_host(func, args, kwargs)
    args, kwargs = pytree.tree_map_only(LazyTensor, value, (args, dict(kwargs)))
    out = func(*args, **kwargs)
    if to_host:
        return out
    return pytree.tree_map_only(torch.Tensor, lambda tensor: _on_device(tensor, recorder), out)


# Operations whose second argument is a list of indices.
INDEXED = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default})


def without_masks(func: OpOverload, args: tuple[Any, ...], recorder: StepRecorder) -> tuple[Any, ...]:
    """Returns the arguments of an indexed operation, with indices instead of masks whose values are known.

    Raises:
        TraceError: The value of a mask is not known, and the shape of the result depends on it.
    """
    tensor, indices, *rest = args
    refusal = messages.value_read(func)
    integer_indices: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            integer_indices.append(index)
            continue
        mask = recorder.known_value(index, refusal) if isinstance(index, LazyTensor) else index
        if mask is None and func is aten.index.Tensor:
            refuse(refusal)
            mask = torch.ones(index.shape, dtype=torch.bool, device="cpu")
        if mask is not None:
            integer_indices.extend(_on_device(chosen, recorder) for chosen in mask.nonzero(as_tuple=True))
        else:
            return args
    return tensor, integer_indices, *rest


def _on_device(tensor: torch.Tensor, recorder: StepRecorder) -> Any:
    return recorder.record(aten._to_copy.default, (tensor,), {"device": DEVICE})
