"""Operations on device tensors outside a traced step: deferred, or run at once on the CPU, on the cells' bytes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from cstorch.tracing import messages
from cstorch.tracing.eager.deferral import defer
from cstorch.tracing.eager.outside_step import without_values, written_down
from cstorch.tracing.operators import Operator, aten, operator
from cstorch.tracing.tensors.cell import Cell
from cstorch.tracing.tensors.operands import TAKES_CPU_TENSORS, moves_to_host
from cstorch.tracing.tensors.tensor import META, Handle, LazyTensor, follow_meta, is_device, new_tensor

_CPU = torch.device("cpu")

# Results of zeros, or of anything: a new cell is that without being touched.
_ZEROS = frozenset(
    {aten.zeros.default, aten.empty.memory_format, aten.empty_strided.default, aten.zeros_like.default}
    | {aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default}
)
# Operations that overwrite the whole of their first argument whatever it was.
_OVERWRITES = frozenset(
    {aten.copy_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.normal_.default}
    | {aten.uniform_.default}
)


class _Pair(NamedTuple):
    """A device tensor and its bytes. While `whole` is kept, other views of the cell are of the same memory."""

    tensor: LazyTensor
    data: torch.Tensor
    whole: torch.Tensor


def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run one ATen call.

    Raises TraceError where the value of a tensor of a traced step is needed and not known, and for tensors of the CPU
    beside those of the device.
    """
    if func not in TAKES_CPU_TENSORS:
        _check_devices(func, [*args, *kwargs.values()])
    args = without_values(func, args)
    if (expression := written_down(func, args, kwargs)) is not NotImplemented:
        return expression
    op = operator(func)
    if (op.views and not op.written) or op.reshapes:
        return _view(func, op, args, kwargs)
    if func in _ZEROS and not _is_host(kwargs.get("device")):
        meta = func(*(_meta(argument) for argument in args), **{**kwargs, "device": META})
        if meta.is_contiguous():
            return new_tensor(Cell(tuple(meta.shape), meta.dtype))
    if (deferred := defer(func, args, kwargs)) is not None:
        return deferred
    if func in _OVERWRITES and isinstance(args[0], LazyTensor):
        handle = args[0]._handle
        is_read = any(_is_of(handle.cell, argument) for argument in args[1:])
        if handle.cell is not None and handle.meta.numel() == handle.cell.numel and not is_read:
            handle.cell.forget()
    pairs: list[_Pair] = []
    cpu_args = [_bytes(argument, pairs) for argument in args]
    cpu_kwargs = {name: _bytes(argument, pairs) for name, argument in kwargs.items()}
    out = func(*cpu_args, **cpu_kwargs)
    _touch(op, args, kwargs)
    if moves_to_host(func, args, kwargs):
        return out
    if isinstance(out, (list, tuple)):
        return type(out)([_wrap(item, pairs) for item in out])
    return _wrap(out, pairs)


def _check_devices(func: OpOverload, arguments: list[Any]) -> None:
    tensors = [
        tensor
        for argument in arguments
        for tensor in (argument if isinstance(argument, (list, tuple)) else [argument])
        if isinstance(tensor, torch.Tensor)
    ]
    own = [tensor for tensor in tensors if not isinstance(tensor, LazyTensor) and tensor.dim()]
    if own and any(isinstance(tensor, LazyTensor) for tensor in tensors):
        raise messages.mixed_devices(func, own[0].device.type)


def _is_of(cell: Cell | None, argument: Any) -> bool:
    return isinstance(argument, LazyTensor) and argument._handle.cell is cell


def _is_host(device: Any) -> bool:
    """True for a device that is named and is not ours."""
    return device is not None and not is_device(device)


def _view(func: OpOverload, op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A view concerns shapes only: the bytes are not touched, nor fetched."""
    source = args[0]
    assert isinstance(source, LazyTensor)
    assert source._handle.cell is not None
    if source._handle.base is not None:
        source._handle.base.is_viewed = True
    out = func(*(_meta(argument) for argument in args), **kwargs)
    if op.reshapes:
        follow_meta(source)
        return source
    if isinstance(out, (list, tuple)):
        return type(out)([LazyTensor(Handle(meta, source._handle.cell)) for meta in out])
    return LazyTensor(Handle(out, source._handle.cell))


def _meta(argument: Any) -> Any:
    return argument._handle.meta if isinstance(argument, LazyTensor) else argument


def _bytes(argument: Any, pairs: list[_Pair]) -> Any:
    """The argument with CPU tensors for device tensors; each pair is added to `pairs`."""
    if isinstance(argument, LazyTensor):
        cell, meta = argument._handle.cell, argument._handle.meta
        assert cell is not None
        whole = data = cell.data()
        if meta.dtype != cell.dtype:
            data = data.view(-1).view(meta.dtype)
        data = data.as_strided(meta.shape, meta.stride(), meta.storage_offset())
        pairs.append(_Pair(argument, data, whole))
        return data
    if isinstance(argument, (list, tuple)):
        return [_bytes(item, pairs) for item in argument]
    if isinstance(argument, torch.device):
        return _CPU if is_device(argument) else argument
    return argument


def _touch(op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Count a write for each cell that the call wrote to."""
    for position, name in zip(op.written, op.written_names, strict=True):
        argument = args[position] if position < len(args) else kwargs.get(name)
        for item in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(item, LazyTensor) and item._handle.cell is not None:
                item._handle.cell.touch()


def _wrap(result: Any, pairs: list[_Pair]) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    for pair in pairs:
        if result is pair.data:  # written in place
            return pair.tensor
    cell = Cell(tuple(result.shape), result.dtype)
    cell.write(result)
    return new_tensor(cell)
