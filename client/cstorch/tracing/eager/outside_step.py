"""Operations in the body of a loop on values of the step at hand: written down until the values come."""

import operator as python_operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from cstorch.errors import TraceError
from cstorch.tracing import messages
from cstorch.tracing.operators import SHAPE_ONLY, aten, operator
from cstorch.tracing.provenance import user_line
from cstorch.tracing.tensors.cell import Cell
from cstorch.tracing.tensors.operands import moves_to_host
from cstorch.tracing.tensors.step_value import StepValue
from cstorch.tracing.tensors.step_values import (
    StepAtHand,
    changed_in_closure,
    host_argument,
    in_place_refused,
    settle,
    shapes_of,
    step_at_hand,
    unknown_state,
    unknown_value,
    unknown_value_yet,
)
from cstorch.tracing.tensors.tensor import LazyTensor, new_tensor

# Operations that take shape and type of a tensor, and not its value.
_LIKE = SHAPE_ONLY | {aten.rand_like.default, aten.randn_like.default}


def without_values(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with zeros for a tensor whose value an operation does not look at."""
    if func in _LIKE and isinstance(args[0], LazyTensor) and _is_unknown(args[0], step_at_hand()):
        return (new_tensor(Cell(tuple(args[0].shape), args[0].dtype)), *args[1:])
    return args


def written_down(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call that takes values of a step; NotImplemented if it takes none.

    Raises:
        TraceError: it needs the values now, or changes what the cluster changes.
    """
    step = step_at_hand()
    found = [tensor for tensor in _tensors([*args, *kwargs.values()]) if _is_unknown(tensor, step)]
    op = operator(func)
    if op.written and step is not None and step.phase == "closures" and not step.is_last:
        changed = args[op.written[0]] if op.written[0] < len(args) else None
        if isinstance(changed, LazyTensor) and step.is_state(changed._handle):
            raise changed_in_closure(changed)
    if not found or func in _LIKE:
        return NotImplemented
    if (op.views or op.reshapes) and found[0]._handle.cell is not None:
        return NotImplemented  # a view of a state reads nothing
    deferred = found[0]._handle.deferred
    if step is None:
        raise messages.stale(found[0]) if deferred is None else unknown_value(deferred)
    if torch._C._current_autograd_node() is not None:
        raise outside_backward()
    if op.reads_values or moves_to_host(func, args, kwargs):
        if found[0]._handle.cell is not None:
            raise unknown_state(step)
        raise unknown_value_yet(step) if deferred is None else unknown_value(deferred)
    if op.random:
        raise TraceError(
            f"at {user_line()} `{op.name}` draws random numbers for a value of the step, in the body of the loop: draw "
            "them in the @cstorch.trace function, or in a step closure"
        )
    if op.written or op.reshapes:
        return _in_place(func, args, kwargs, step)
    try:
        out = shapes_of(func, args, kwargs)
    except NotImplementedError:  # the shape depends on values
        raise unknown_value_yet(step) from None
    value = _call(func, args, kwargs, step)
    if op.views:
        _mark_viewed(args[0])
    if isinstance(out, (list, tuple)):
        parts = [StepValue(step=step.number, call=(python_operator.getitem, (value, i), {})) for i in range(len(out))]
        return type(out)([step.show(part, meta) for part, meta in zip(parts, out, strict=True)])
    return step.show(value, out)


def _call(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: StepAtHand) -> StepValue:
    taken = tuple(host_argument(argument, step) for argument in args)
    named = {name: host_argument(argument, step) for name, argument in kwargs.items()}
    return StepValue(step=step.number, call=(func, taken, named))


def _in_place(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: StepAtHand) -> Any:
    """A sum that the body keeps is a new value after each change; no other tensor may share its memory."""
    target = args[0]
    base = target._handle.base if isinstance(target, LazyTensor) else None
    own = isinstance(target, LazyTensor) and target._handle.trace == 0 and not step.is_state(target._handle)
    if not own or base is None or base.is_viewed or operator(func).written != (0,) or operator(func).reshapes:
        raise in_place_refused()
    shapes_of(func, args, kwargs)
    before = step.value_of(target)
    copied = StepValue(step=step.number, call=(torch.clone, (before,), {}))
    value = _call(func, (target, *args[1:]), kwargs, step)
    assert value.call is not None
    value.call = (func, (copied, *value.call[1][1:]), value.call[2])
    target._handle.cell, target._handle.deferred = None, value
    step.keep(target)
    return target


def _tensors(arguments: list[Any]) -> Iterator[LazyTensor]:
    for argument in arguments:
        for item in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(item, LazyTensor):
                yield item


def _is_unknown(tensor: LazyTensor, step: StepAtHand | None) -> bool:
    """Whether the value is one of a step, and not known here."""
    handle = tensor._handle
    settle(handle)
    if handle.cell is None:
        return True
    return step is not None and step.phase != "closures" and step.is_state(handle)


def _mark_viewed(tensor: Any) -> None:
    if isinstance(tensor, LazyTensor) and tensor._handle.base is not None:
        tensor._handle.base.is_viewed = True


def outside_backward() -> TraceError:
    """The error for a backward pass in the body of the loop."""
    return TraceError(
        f"at {user_line()} backward() is called outside of the traced function: a step is traced whole, with its "
        "backward pass and the step of the optimizer. Call loss.backward() and optimizer.step() in the @cstorch.trace "
        "function"
    )
