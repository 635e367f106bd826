"""Lowering of operations without a rule by their parts: decompositions of torch, and formulas for others."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._ops import OpOverload

from cstorch._internal.tracing import Argument, Call, Ref, functionalize
from waferbox.cirh.dialect.source import Source

# --- Formulas for operations without a decomposition in torch ---------------------------------------------------------


aten = torch.ops.aten


def _masked_scatter(input: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Writes the elements of the source, in order, where the mask is true."""
    shape = torch.broadcast_shapes(mask.shape, input.shape)  # type: ignore[no-untyped-call]
    mask, input = mask.expand(shape), input.expand(shape)
    position = (mask.reshape(-1).cumsum(0) - 1).clamp(min=0).reshape(mask.shape)
    return torch.where(mask, source.reshape(-1)[position], input)


def _masked_scatter_backward(gradient: torch.Tensor, mask: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    mask = mask.expand(gradient.shape).reshape(-1)
    position = (mask.cumsum(0) - 1).clamp(min=0)
    kept = torch.where(mask, gradient.reshape(-1), 0.0)
    return gradient.new_zeros(math.prod(sizes)).scatter_add(0, position, kept).reshape(sizes)


def _unfold(input: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """The windows of a dimension, with their elements in a new last dimension."""
    if not input.dim():
        return input.reshape(1)[:size].clone()
    dimension %= input.dim()
    windows, positions = _windows(input.shape[dimension], size, step, input.device)
    taken = input.index_select(dimension, positions)
    apart = taken.reshape(*input.shape[:dimension], windows, size, *input.shape[dimension + 1 :])
    return apart.movedim(dimension + 1, -1)


def _unfold_backward(
    gradient: torch.Tensor, sizes: Sequence[int], dimension: int, size: int, step: int
) -> torch.Tensor:
    if not sizes:
        return gradient.sum()
    dimension %= len(sizes)
    _, positions = _windows(sizes[dimension], size, step, gradient.device)
    source = gradient.movedim(-1, dimension + 1).flatten(dimension, dimension + 1)
    return gradient.new_zeros(sizes).index_add(dimension, positions, source)


def _windows(length: int, size: int, step: int, device: torch.device) -> tuple[int, torch.Tensor]:
    """Returns the number of windows, and the indices of their elements."""
    windows = (length - size) // step + 1
    starts = torch.arange(windows, device=device).unsqueeze(1) * step
    return windows, (starts + torch.arange(size, device=device)).reshape(-1)


def _cdist_forward(first: torch.Tensor, second: torch.Tensor, p: float, mode: int | None = None) -> torch.Tensor:
    """The distance of each row of the first to each row of the second tensor."""
    distances = first.unsqueeze(-2) - second.unsqueeze(-3)
    return torch.linalg.vector_norm(distances, p, -1)


def _cdist_backward(
    gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor, p: float, norm: torch.Tensor
) -> torch.Tensor:
    return _norm_backward(gradient, first.unsqueeze(-2) - second.unsqueeze(-3), p, norm).sum(-2)


def _pdist_forward(input: torch.Tensor, p: float = 2) -> torch.Tensor:
    """The distance of each row to each later one."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return torch.linalg.vector_norm(input[first] - input[second], p, -1)


def _pdist_backward(gradient: torch.Tensor, input: torch.Tensor, p: float, norm: torch.Tensor) -> torch.Tensor:
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    slope = _norm_backward(gradient, input[first] - input[second], p, norm)
    return torch.zeros_like(input).index_add(0, first, slope).index_add(0, second, -slope)


def _norm_backward(gradient: torch.Tensor, difference: torch.Tensor, p: float, norm: torch.Tensor) -> torch.Tensor:
    """The gradient of the norms of the rows of a difference, with regard to that."""
    gradient, norm = gradient.unsqueeze(-1), norm.unsqueeze(-1)
    if p == 0:
        slope = torch.zeros_like(difference)
    elif p == 1:
        slope = difference.sign()
    elif p == math.inf:
        slope = difference.sign() * (difference.abs() == norm)
    elif p == 2:
        slope = difference / norm
    else:
        slope = difference.sign() * (difference.abs() / norm) ** (p - 1)
    return gradient * torch.where(norm == 0, 0.0, slope)


def _weight_norm_backward(
    gradient: torch.Tensor, direction: torch.Tensor, size: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `direction * (size / norms)`."""
    others = [other for other in range(direction.dim()) if other != dim % direction.dim()]
    along = (gradient * direction).sum(others, keepdim=True)
    return (size / norms) * (gradient - direction * (along / (norms * norms))), along / norms


def _index_fill(input: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    if not input.dim():
        return torch.full_like(input, value) if not isinstance(value, torch.Tensor) else value.to(input.dtype)
    dim %= input.dim()
    positions = torch.arange(input.shape[dim], device=input.device)
    chosen = (positions.unsqueeze(1) == index.reshape(-1) % input.shape[dim]).any(1)
    return torch.where(chosen.reshape(-1, *[1] * (input.dim() - dim - 1)), value, input)


def _addbmm(
    input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return input * beta + torch.bmm(batch1, batch2).sum(0) * alpha


def _trilinear(
    first: torch.Tensor,
    second: torch.Tensor,
    third: torch.Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    summed: Sequence[int],
    unroll: int = 1,
) -> torch.Tensor:
    """The product of three tensors, each with new dimensions of size one, summed over some dimensions."""
    factors = []
    for factor, dims in ((first, expand1), (second, expand2), (third, expand3)):
        for dim in sorted(dims):
            factor = factor.unsqueeze(dim)
        factors.append(factor)
    product = factors[0] * factors[1] * factors[2]
    return product.sum(list(summed)) if summed else product


def _diagonal_scatter(
    input: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    matrix = input.movedim((dim1, dim2), (-2, -1))
    rows = torch.arange(matrix.shape[-2], device=input.device)
    columns = torch.arange(matrix.shape[-1], device=input.device)
    is_on = columns - rows.unsqueeze(1) == offset
    if not source.shape[-1]:
        return input.clone()
    number = (rows if offset >= 0 else columns).clamp(max=source.shape[-1] - 1)
    spread = source.index_select(-1, number).unsqueeze(-1 if offset >= 0 else -2)
    return torch.where(is_on, spread, matrix).movedim((-2, -1), (dim1, dim2))


def _pinv(
    input: torch.Tensor,
    *,
    atol: torch.Tensor | None = None,
    rtol: torch.Tensor | None = None,
    hermitian: bool = False,
) -> torch.Tensor:
    """The pseudoinverse: singular values up to max(atol, rtol * the largest one) count as zero."""
    if hermitian:
        values, left = torch.linalg.eigh(input)
        sizes, right = values.abs(), left.mT
    else:
        left, values, right = torch.linalg.svd(input, full_matrices=False)
        sizes = values
    if rtol is None and atol is None:
        rtol = sizes.new_full((), torch.finfo(sizes.dtype).eps * max(input.shape[-2:]))
    limit = sizes.new_zeros(()) if atol is None else atol.unsqueeze(-1)
    if rtol is not None:
        limit = torch.maximum(limit, rtol.unsqueeze(-1) * sizes.amax(-1, keepdim=True))
    inverse = torch.where(sizes > limit, 1 / values, 0.0)
    return (right.mT * inverse.unsqueeze(-2)) @ left.mT


def _shifted(shift: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns the shift of two tensors in a form that also takes a number and a tensor."""

    def shifted(first: torch.Tensor | int, second: torch.Tensor | int) -> torch.Tensor:
        like = first if isinstance(first, torch.Tensor) else second
        assert isinstance(like, torch.Tensor)
        return shift(
            *(item if isinstance(item, torch.Tensor) else like.new_full(like.shape, item) for item in (first, second))
        )

    return shifted


_shifted_left, _shifted_right = _shifted(torch.bitwise_left_shift), _shifted(torch.bitwise_right_shift)


def _take(input: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Reads from positions in the tensor as if it were one row."""
    return aten.index.Tensor(input.reshape(-1), [index])


def _put(input: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """Writes to positions in the tensor as if it were one row."""
    row = input.reshape(-1)
    return row.index_put((index.reshape(-1),), source.reshape(-1), accumulate).reshape(input.shape)


def _histc(input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Counts the elements in equal bins between two bounds; two that are equal stand for the extremes of the tensor."""
    values = input.reshape(-1)
    if min == max and len(values):
        low, high = values.min(), values.max()
        is_one = low == high
        low, high = torch.where(is_one, low - 1, low), torch.where(is_one, high + 1, high)
    else:
        low, high = (torch.full((), bound, dtype=input.dtype, device=input.device) for bound in (min, max))
    inside = (values >= low) & (values <= high)
    position = torch.where(inside, (values - low) * bins / (high - low), 0).to(torch.int64).clamp(max=bins - 1)
    return input.new_zeros(bins).scatter_add(0, position, inside.to(input.dtype))


def _nonzero_static(input: torch.Tensor, *, size: int, fill_value: int = -1) -> torch.Tensor:
    """The indices of the first elements that are not zero, and the fill value for those that there are not."""
    mask = (input != 0).reshape(-1)
    places = torch.where(mask, mask.cumsum(0) - 1, size).clamp(max=size)  # the last row is dropped
    number = torch.arange(len(mask), device=input.device)
    indices = [number // math.prod(input.shape[place + 1 :]) % length for place, length in enumerate(input.shape)]
    found = torch.stack(indices, 1) if indices else number.unsqueeze(1)[:, :0]
    return found.new_full((size + 1, input.dim()), fill_value).index_put((places,), found)[:size]


FORMULAS: Mapping[OpOverload, Callable[..., Any]] = {
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.unfold.default: _unfold,
    aten.unfold_copy.default: _unfold,
    aten.unfold_backward.default: _unfold_backward,
    aten._cdist_forward.default: _cdist_forward,
    aten._cdist_backward.default: _cdist_backward,
    aten._pdist_forward.default: _pdist_forward,
    aten._pdist_backward.default: _pdist_backward,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.addbmm.default: _addbmm,
    aten._trilinear.default: _trilinear,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.linalg_pinv.atol_rtol_tensor: _pinv,
    aten.__lshift__.Scalar: _shifted_left,
    aten.__lshift__.Tensor: _shifted_left,
    aten.__rshift__.Scalar: _shifted_right,
    aten.__rshift__.Tensor: _shifted_right,
    aten.bitwise_left_shift.Tensor_Scalar: _shifted_left,
    aten.bitwise_left_shift.Scalar_Tensor: _shifted_left,
    aten.bitwise_right_shift.Tensor_Scalar: _shifted_right,
    aten.bitwise_right_shift.Scalar_Tensor: _shifted_right,
    aten.take.default: _take,
    aten.put.default: _put,
    aten.histc.default: _histc,
    aten.nonzero_static.default: _nonzero_static,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
}

# --- Decompositions ---------------------------------------------------------------------------------------------------
#
# A decomposition is a function of tensors. It is recorded like a step, which turns its views and in-place writes into
# pure functions, and its parts are lowered instead of the operation.

Decomposition = Callable[..., Any]

_META = torch.device("meta")
# Errors of decompositions that need values, or lack a form for the arguments.
_CANNOT = (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError, AssertionError)


def decomposition_of(func: OpOverload) -> Decomposition | None:
    """Returns the decomposition of an operation; None if there is none."""
    # A decomposition of a random operation would draw other numbers.
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    known = FORMULAS.get(func) or decomposition_table.get(func)
    if known is not None:
        return known
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    return func.decompose if is_composite else None


def parts_of(node: fx.Node, decomposition: Decomposition, source: Source) -> fx.Graph | None:
    """Returns the graph that computes the results of an operation; None if the decomposition fails.

    Its placeholders are the nodes that the operation reads, in order; its results are the operation's tensors.
    """
    read = list(node.all_input_nodes)
    arguments = [
        Argument(kind="input", name="", value=number, meta=_like(operand.meta["val"]))
        for number, operand in enumerate(read)
    ]
    references = {operand: Ref(number) for number, operand in enumerate(read)}
    args, named = fx.node.map_arg((node.args, node.kwargs), references.__getitem__)  # type: ignore[arg-type]
    kwargs = dict(named)
    if any(argument.name == "device" for argument in node.target._schema.arguments):  # type: ignore[union-attr]
        kwargs["device"] = _META
    results = [len(read) + number if leaf is not None else None for number, leaf in enumerate(results_of(node))]
    call = Call(decomposition, args, kwargs, tuple(results), source)
    try:
        return functionalize(arguments, [call], [result for result in results if result is not None])
    except _CANNOT:
        return None


def results_of(node: fx.Node) -> list[torch.Tensor | None]:
    """Returns the results of an operation as meta tensors; None for results that are no tensors."""
    made = node.meta["val"]
    listed = made if isinstance(made, (list, tuple)) else [made]
    return [item if isinstance(item, torch.Tensor) else None for item in listed]


def _like(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=_META)
