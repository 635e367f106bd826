"""Operators of torch that take functions (torch.cond, scan, map, while_loop), traced as what the functions call.

A `torch.autograd.Function` within a transform, such as torch.vmap or torch.func.grad, is such an operator too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._functorch.autograd_function import custom_function_call
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from cstorch._internal.tracing import messages
from cstorch._internal.tracing.context import context
from cstorch._internal.tracing.provenance import user_line
from cstorch._internal.tracing.tensor import LazyTensor, known_value
from cstorch.errors import TraceError

Function = Callable[..., Any]


def run(operator: HigherOrderOperator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator that takes functions in a traced step.

    Raises:
        TraceError: It has no form that can be traced.
    """
    form = _FORMS.get(operator)
    if form is not None:
        return form(*args, **kwargs)
    if any(isinstance(leaf, LazyTensor) for leaf in pytree.tree_leaves((args, kwargs))):
        raise messages.higher_order(operator.__name__)
    return operator(*args, **kwargs)


def cond(pred: Any, true_fn: Function, false_fn: Function, operands: Sequence[Any] = ()) -> Any:
    """torch.cond: one branch if the predicate is known, else both, and torch.where of their results.

    The gradient is that of torch.where: NaN where the branch that is not taken has an infinite one.
    """
    chosen = known_value(pred)
    if chosen is not None:
        return (true_fn if chosen else false_fn)(*operands)
    if pred.numel() != 1:
        raise TraceError(
            f"at {user_line()} the predicate of torch.cond has {pred.numel()} elements. Give it one, as of pred.all(); "
            "to choose for each element write torch.where(pred, a, b)"
        )
    taken, other = (_without_writes(branch, operands) for branch in (true_fn, false_fn))
    leaves, structure = pytree.tree_flatten(taken)
    other_leaves, other_structure = pytree.tree_flatten(other)
    if structure != other_structure:
        raise _different(structure, other_structure)
    is_true = pred.reshape(()).bool()
    return pytree.tree_unflatten(
        [_chosen(is_true, *pair) for pair in zip(leaves, other_leaves, strict=True)], structure
    )


def _without_writes(branch: Function, operands: Sequence[Any]) -> Any:
    """Calls a branch, whose operations run in any case: it must not write to a tensor from outside of it."""
    recorder = context.recorder
    assert recorder is not None
    start = recorder.place()
    result = branch(*operands)
    if (line := recorder.first_write_since(start)) is not None:
        raise TraceError(
            f"at {user_line()} a branch of torch.cond writes in place, at {line}, to a tensor that exists before it. "
            "The step runs both branches, and torch.where chooses: return the new value from both, and write it "
            "afterwards (batch norm in training, whose statistics are such tensors, must be outside of torch.cond)"
        )
    return result


def _chosen(is_true: torch.Tensor, one: Any, other: Any) -> Any:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            raise _different(_kind(one), _kind(other))
        return torch.where(is_true, one, other)
    if one is not other and (type(one) is not type(other) or one != other):
        raise _different(repr(one), repr(other))
    return one


def _kind(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} and type {tensor.dtype}"


def _different(one: Any, other: Any) -> TraceError:
    return TraceError(
        f"at {user_line()} the branches of torch.cond return different kinds of results: {one} if the predicate is "
        f"true, else {other}. Let both return tensors of the same shapes and types"
    )


def _while_loop(
    cond_fn: Function, body_fn: Function, carried_inputs: Sequence[Any], additional_inputs: Sequence[Any]
) -> Sequence[Any]:
    """torch.while_loop whose conditions are known, as those of a counter."""
    carried = carried_inputs
    while goes_on := known_value(cond_fn(*carried, *additional_inputs)):
        carried = body_fn(*carried, *additional_inputs)
    if goes_on is None:
        raise messages.while_loop()
    return carried


def _scan(combine_fn: Function, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any]) -> Any:
    """Unrolled: the combined function is traced for each row."""
    carry: Any = init
    results = []
    for rows in zip(*xs, strict=True):
        carry, result = combine_fn(*pytree.tree_leaves(carry), *rows, *additional_inputs)
        results.append(result)
    return carry, pytree.tree_map(lambda *parts: torch.stack(parts), *results)


def _map(function: Function, xs: Sequence[Any], others: Sequence[Any]) -> Any:
    """For all rows at once, which may be those of the batch."""
    return torch.vmap(function, (*[0] * len(xs), *[None] * len(others)))(*xs, *others)


def _autograd_function(*args: Any, **kwargs: Any) -> Any:
    """A torch.autograd.Function within a transform, which calls its functions itself."""
    with torch._C.DisableTorchFunction():  # else the operator comes back here
        return custom_function_call(*args, **kwargs)


_FORMS: Mapping[HigherOrderOperator, Function] = {
    custom_function_call: _autograd_function,
    torch.ops.higher_order.cond: cond,
    torch.ops.higher_order.map_impl: _map,
    torch.ops.higher_order.scan: _scan,
    torch.ops.higher_order.while_loop: _while_loop,
}
