"""Fuses layer norm that is written out into aten.native_layer_norm, unless a backward pass reads a value inside it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.matching import (
    are_private,
    broadcast_source,
    commuted,
    fuse_each,
    made_by,
    number,
    same_float,
)
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs
from waferbox.cirh.table.lookup import SEGMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """(x - mean) / sqrt(variance + epsilon) [* gamma [+ beta]], over the last dimensions `dims`.

    `inner` has all its operations but the last one.
    """

    x: SSAValue
    dims: list[int]
    epsilon: float
    inner: list[Operation]
    gamma: SSAValue | None = None
    beta: SSAValue | None = None


def fuse_layer_norm(module: ModuleOp) -> bool:
    """Fuses `(x - mean(x)) * rsqrt(mean((x - mean(x))^2) + epsilon) [* gamma [+ beta]]`.

    Returns:
        Whether there was any.
    """
    return fuse_each(module, ("cirh.Add", "cirh.Mul", "cirh.Div"), _fuse)


def _fuse(root: Operation) -> bool:
    for norm in _readings(root):
        shape = [types.shape(norm.x)[dim] for dim in norm.dims]
        weights = [value for value in (norm.gamma, norm.beta) if value is not None]
        fits = all(list(types.shape(value)) == shape for value in weights) and same_float(norm.x, *weights)
        if fits and are_private(norm.inner, root):
            attributes: dict[str, AttrValue] = {
                "normalized_shape": shape,
                "eps": norm.epsilon,
                SEGMENTS: [1, int(norm.gamma is not None), int(norm.beta is not None)],
            }
            rewriter = Rewriter(root)
            rewriter.replace(rewriter.emit("aten.native_layer_norm", [norm.x, *weights], attributes)[:1])
            return True
    return False


def _readings(root: Operation) -> Iterator[_Norm]:
    """The ways to read an operation as the end of a norm: with weight and bias, with a weight, with neither."""
    if root.name == "cirh.Add":
        for scaled, spread in commuted(root):
            product = made_by(scaled, "cirh.Mul")
            for norm in _weighted(product) if product is not None else ():
                beta = broadcast_source(spread, norm.dims)
                if product is not None and beta is not None:
                    yield replace(norm, beta=beta, inner=[*norm.inner, product])
        return
    yield from _weighted(root)
    yield from _bare(root)


def _weighted(product: Operation) -> Iterator[_Norm]:
    if product.name != "cirh.Mul":
        return
    for value, spread in commuted(product):
        end = made_by(value, "cirh.Mul", "cirh.Div")
        for norm in _bare(end) if end is not None else ():
            gamma = broadcast_source(spread, norm.dims)
            if end is not None and gamma is not None:
                yield replace(norm, gamma=gamma, inner=[*norm.inner, end])


def _bare(end: Operation) -> Iterator[_Norm]:
    """centred * broadcast(rsqrt(..)), or centred / broadcast(sqrt(..))."""
    root_name = "cirh.Rsqrt" if end.name == "cirh.Mul" else "cirh.Sqrt"
    for value, scale in commuted(end) if end.name == "cirh.Mul" else [tuple(end.operands)]:
        centred, spread = made_by(value, "cirh.Sub"), made_by(scale, "cirh.BroadcastInDim")
        root = made_by(spread.operands[0], root_name) if spread is not None else None
        above_zero = made_by(root.operands[0], "cirh.Add") if root is not None else None
        if centred is None or spread is None or root is None or above_zero is None:
            continue
        for variance, constant in commuted(above_zero):
            epsilon, statistics = number(constant), _statistics(centred, variance)
            if epsilon is not None and statistics is not None and _is_spread(spread, statistics[0]):
                dims, inner = statistics
                yield _Norm(
                    x=centred.operands[0],
                    dims=dims,
                    epsilon=epsilon,
                    inner=[centred, spread, root, above_zero, *inner],
                )


def _statistics(centred: Operation, variance: SSAValue) -> tuple[list[int], list[Operation]] | None:
    """The dimensions over which x is centred and its variance is computed, with the operations of both."""
    x = centred.operands[0]
    spread = made_by(centred.operands[1], "cirh.BroadcastInDim")
    mean = _mean(spread.operands[0]) if spread is not None else None
    if spread is None or mean is None or mean[0] is not x or not _is_spread(spread, mean[1]):
        return None
    _, dims, inner = mean
    direct = made_by(variance, "aten.var.correction")
    if direct is not None:
        same = direct.operands[0] is x and _dims(direct, "dim") == dims and attrs(direct).get("correction") == 0
        return (dims, [spread, *inner, direct]) if same else None
    squares = _mean(variance)
    square = made_by(squares[0], "cirh.Mul", "cirh.Pow") if squares is not None else None
    if squares is None or square is None or squares[1] != dims or square.operands[0] is not centred.results[0]:
        return None
    is_square = (
        square.operands[1] is centred.results[0] if square.name == "cirh.Mul" else number(square.operands[1]) == 2
    )
    return (dims, [spread, *inner, square, *squares[2]]) if is_square else None


def _mean(value: SSAValue) -> tuple[SSAValue, list[int], list[Operation]] | None:
    """If a value is a mean over last dimensions: its operand, the dimensions, and the operations."""
    op = made_by(value, "aten.mean.dim", "cirh.Div", "cirh.Mul")
    if op is None:
        return None
    if op.name == "aten.mean.dim":
        return (op.operands[0], _dims(op, "dim"), [op]) if _are_last(op, _dims(op, "dim")) else None
    for total, constant in commuted(op) if op.name == "cirh.Mul" else [tuple(op.operands)]:
        reduce, factor = made_by(total, "cirh.Reduce"), number(constant)
        if reduce is None or factor is None or attrs(reduce)["reduce_kind"] != "ADD":
            continue
        dims = _dims(reduce, "dimensions")
        count = math.prod(types.shape(reduce.operands[0])[dim] for dim in dims)
        counted = factor * count == 1 if op.name == "cirh.Mul" else factor == count
        if counted and _are_last(reduce, dims):
            return reduce.operands[0], dims, [op, reduce]
    return None


def _dims(op: Operation, name: str) -> list[int]:
    rank = len(types.shape(op.operands[0]))
    dims = attrs(op).get(name)
    return sorted(dim % rank for dim in dims) if isinstance(dims, list) and dims else list(range(rank))


def _are_last(op: Operation, dims: list[int]) -> bool:
    rank = len(types.shape(op.operands[0]))
    return dims == list(range(rank - len(dims), rank)) and types.dtype(op.operands[0]) == types.dtype(op.results[0])


def _is_spread(spread: Operation, dims: list[int]) -> bool:
    """Whether a statistic is broadcast back to the dimensions it was computed from, each to itself."""
    rank = len(types.shape(spread.results[0]))
    kept = len(types.shape(spread.operands[0])) == rank
    wanted = list(range(rank)) if kept else [dim for dim in range(rank) if dim not in dims]
    return attrs(spread)["broadcast_dimensions"] == wanted
