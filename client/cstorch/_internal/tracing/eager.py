"""Operations on device tensors outside a traced step: deferred until the value is read, or run at once on the CPU."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from cstorch._internal.tracing import generator, messages
from cstorch._internal.tracing.cell import RAM_BYTES, Cell
from cstorch._internal.tracing.context import purpose
from cstorch._internal.tracing.initialisation import Call, Initialisation, Operand
from cstorch._internal.tracing.operators import (
    TAKES_CPU_TENSORS,
    Operator,
    as_meta,
    aten,
    is_whole,
    moves_to_host,
    operator,
)
from cstorch._internal.tracing.postponed import postpone
from cstorch._internal.tracing.step_values import deferred_result, without_values
from cstorch._internal.tracing.tensor import META, Handle, LazyTensor, follow_meta, is_device, new_tensor
from cstorch._internal.tracing.truncated_normal import state_after
from cstorch.backends import csx
from waferbox.cirh.execution.initialisation import OPERATORS, RANDOM
from waferbox.cirh.execution.truncated_normal import TRUNCATED_NORMAL

# --- Lazy initialisation ----------------------------------------------------------------------------------------------
#
# A deferred call runs where its value is needed first: on the shard of MemoryX that keeps the weight, or here when the
# script reads it. Calls that cannot be deferred run at once, so laziness changes the time at which a value is
# made, and never the value. Random calls leave torch's generator as if they had run.

# Tensors of one number: deferred in any case, since their bytes have no information.
_FILLS = frozenset(
    {aten.zero_.default, aten.fill_.Scalar, aten.full.default, aten.ones.default, aten.full_like.default}
    | {aten.ones_like.default, aten.new_ones.default}
)
# Operations that overwrite a whole tensor, whatever its value was.
_OVERWRITES = RANDOM | {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default}
# Factories: the operation that fills an empty tensor, with these numbers or with the second argument.
_FACTORIES: Mapping[OpOverload, tuple[Any, ...]] = {
    aten.rand.default: (aten.uniform_.default, 0.0, 1.0),
    aten.randn.default: (aten.normal_.default, 0.0, 1.0),
    aten.rand_like.default: (aten.uniform_.default, 0.0, 1.0),
    aten.randn_like.default: (aten.normal_.default, 0.0, 1.0),
    aten.ones.default: (aten.fill_.Scalar, 1),
    aten.ones_like.default: (aten.fill_.Scalar, 1),
    aten.new_ones.default: (aten.fill_.Scalar, 1),
    aten.full.default: (aten.fill_.Scalar,),
    aten.full_like.default: (aten.fill_.Scalar,),
}
_IGNORED_ARGUMENTS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
_TYPES = frozenset(
    {torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}
    | {torch.float64}
)


class _Impossible(Exception):
    """The call cannot be deferred."""


def defer(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LazyTensor | None:
    """Defers a call and returns its result; None if it must run at once."""
    if func not in _FILLS and not csx.debug.lazy_initialization:
        return None
    try:
        if func in _FACTORIES:
            return _filled(func, args, kwargs)
        if func in OPERATORS and not moves_to_host(func, args, kwargs):
            return _in_place(func, args, kwargs) if operator(func).written else _new(func, args, kwargs)
    except _Impossible:
        pass
    return None


def _in_place(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LazyTensor:
    target = args[0]
    cell = target._handle.cell if isinstance(target, LazyTensor) else None
    if cell is None or cell.nbytes < RAM_BYTES or cell.dtype not in _TYPES:
        raise _Impossible
    meta = target._handle.meta
    made = cell.initialisation if not cell.is_made else None  # a value that was read may be read again
    if func in _OVERWRITES and is_whole(meta, cell):
        made = Initialisation(cell.numel, cell.dtype)  # earlier calls are of no effect
    if made is None or meta.dtype != cell.dtype:
        raise _Impossible
    if torch._debug_has_internal_overlap(meta) == 1 or any(_overlaps(target, argument) for argument in args[1:]):
        raise _Impossible  # the CPU kernel raises the error
    named = _named(kwargs)
    _on_meta(func, args, named)
    operands = [_part(made, meta), *(_operand(argument) for argument in args[1:])]
    random = _random_state(func, meta, args[1:], kwargs.get("generator")) if func in RANDOM else None
    before = random[1].get_state() if random is not None else None
    if not made.add(Call(func=func, args=tuple(operands), kwargs=named, generator=before)):
        raise _Impossible
    if random is not None:
        after, source = random
        source.set_state(after)
    cell.initialise(made)
    return target


def _overlaps(target: LazyTensor, argument: Any) -> bool:
    """Whether an argument is another view of the tensor that the call writes to."""
    if not isinstance(argument, LazyTensor) or argument._handle.cell is not target._handle.cell:
        return False
    one, other = argument._handle.meta, target._handle.meta
    layouts = {(tuple(meta.shape), tuple(meta.stride()), meta.storage_offset()) for meta in (one, other)}
    return len(layouts) > 1


def _new(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LazyTensor:
    named = _named(kwargs)
    meta = _on_meta(func, args, {**named, **({"device": META} if "device" in kwargs else {})})
    cell = _room_for(meta)
    if any(argument.name == "dtype" for argument in func._schema.arguments):
        named["dtype"] = meta.dtype
    elif torch.get_default_dtype() is not torch.float32:
        raise _Impossible  # the type of the result may depend on it, and the default elsewhere is float32
    made = Initialisation(cell.numel, cell.dtype)
    if not made.add(Call(func=func, args=tuple(_operand(argument) for argument in args), kwargs=named)):
        raise _Impossible
    cell.initialise(made)
    return new_tensor(cell)


def _filled(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LazyTensor:
    """Defers a factory of random numbers, or of one number in all elements."""
    meta = _on_meta(func, args, {**_named(kwargs), "device": META})
    filling, *numbers = _FACTORIES[func]
    return _in_place(filling, (new_tensor(_room_for(meta)), *(numbers or args[1:])), {})


def _room_for(meta: Any) -> Cell:
    if not isinstance(meta, torch.Tensor) or meta.nbytes < RAM_BYTES or meta.dtype not in _TYPES:
        raise _Impossible
    if not meta.is_contiguous():
        raise _Impossible
    return Cell(tuple(meta.shape), meta.dtype)


def _named(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments that change the result."""
    left = {name: value for name, value in kwargs.items() if name not in _IGNORED_ARGUMENTS and name != "generator"}
    if any(isinstance(value, torch.Tensor) for value in left.values()):
        raise _Impossible
    return left


def _on_meta(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a call on meta tensors. A call that fails runs on the CPU, for the CPU's error."""
    try:
        return func(*(as_meta(argument) for argument in args), **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        raise _Impossible from None


def _part(made: Initialisation | torch.Tensor, meta: torch.Tensor) -> Operand:
    return Operand(source=made, shape=tuple(meta.shape), stride=tuple(meta.stride()), offset=int(meta.storage_offset()))


def _operand(argument: Any) -> Any:
    """Returns an argument in the form in which a deferred call stores it."""
    if isinstance(argument, LazyTensor):
        cell, meta = argument._handle.cell, argument._handle.meta
        if cell is None or cell.dtype != meta.dtype or cell.dtype not in _TYPES:
            raise _Impossible
        if cell.initialisation is not None:
            return _part(cell.initialisation, meta)
        if cell.nbytes >= RAM_BYTES or cell.remote:
            raise _Impossible
        return _constant(cell.data().as_strided(meta.shape, meta.stride(), meta.storage_offset()))
    if isinstance(argument, torch.Tensor):
        return _constant(argument)
    if isinstance(argument, (list, tuple)):
        return [_operand(item) for item in argument]
    if argument is None or isinstance(argument, (bool, int, float, torch.dtype)):
        return argument
    raise _Impossible


def _constant(tensor: torch.Tensor) -> Operand:
    """Returns an operand with the present value of a small CPU tensor."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype not in _TYPES:
        raise _Impossible
    if tensor.nbytes >= RAM_BYTES:
        raise _Impossible
    value = tensor.detach().clone(memory_format=torch.contiguous_format)
    return _part(value, value)


def _random_state(
    func: OpOverload, meta: torch.Tensor, numbers: tuple[Any, ...], given: torch.Generator | None
) -> tuple[torch.Tensor, torch.Generator]:
    """Returns the state of the generator after a random call, and the generator."""
    source = torch.default_generator if given is None else given
    count = generator.uniform_draws if func is aten.uniform_.default else generator.normal_draws
    draws = count(meta.numel(), meta.dtype) if meta.is_contiguous() and source.device.type == "cpu" else None
    if draws is None:
        raise _Impossible
    if func is TRUNCATED_NORMAL:
        return state_after(meta, numbers, source), source
    return generator.skip(source.get_state(), draws), source


# --- Calls on the CPU -------------------------------------------------------------------------------------------------

_CPU = torch.device("cpu")

# Operations that return zeros, or an empty tensor, as a new cell is.
_ZEROS = frozenset(
    {aten.zeros.default, aten.empty.memory_format, aten.empty_strided.default, aten.zeros_like.default}
    | {aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default}
)


class _Pair(NamedTuple):
    """A device tensor and its bytes. While `whole` is alive, all views of the cell share its memory."""

    tensor: LazyTensor
    data: torch.Tensor
    whole: torch.Tensor


def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs one ATen call.

    Raises:
        TraceError: The call needs an unknown value of a traced step, or mixes CPU tensors with device tensors.
    """
    if func not in TAKES_CPU_TENSORS:
        _check_devices(func, [*args, *kwargs.values()])
    args = without_values(func, args)
    if (expression := deferred_result(func, args, kwargs)) is not NotImplemented:
        return expression
    op = operator(func)
    if (op.views and not op.written) or op.reshapes:
        return _view(func, op, args, kwargs)
    if func in _ZEROS:
        meta = func(*(_meta(argument) for argument in args), **{**kwargs, "device": META})
        if meta.is_contiguous():
            return new_tensor(Cell(tuple(meta.shape), meta.dtype))
    if (deferred := defer(func, args, kwargs)) is not None:
        return deferred
    if not purpose.runs_steps and (postponed := postpone(func, args, kwargs)) is not NotImplemented:
        return postponed
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


def _view(func: OpOverload, op: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Makes a view, without a read of the bytes."""
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
    """Returns an argument with CPU tensors instead of device tensors, and adds each pair to `pairs`."""
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
    """Counts a write for each cell that the call wrote to."""
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
