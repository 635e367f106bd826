"""The parts of operations that hide a factor or a statistic of the whole batch.

Used only where the batch is cut: on one wafer they stay whole, with torch's own speed and rounding.
"""

import math
from collections.abc import Callable

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import refuse
from appliance.compiler.core.reductions import MEAN, TOTAL
from appliance.compiler.core.rewriter import Rewriter, erase
from appliance.compiler.sharding.batch_norm import batch_norm, batch_norm_backward
from appliance.compiler.sharding.layer_norm import layer_norm
from appliance.compiler.sharding.rules.decompose_index import index_own, index_put_own
from appliance.compiler.sharding.rules.rule import ONE_WAFER
from appliance.compiler.sharding.sums import divided, spread, sum_over
from cirh.dialect import types
from cirh.dialect.attributes import AttrValue, attrs

Decomposition = Callable[[Operation, Rewriter], list[SSAValue]]


def _reduced_dims(op: Operation, name: str) -> list[int]:
    given = attrs(op).get(name)
    rank = len(types.shape(op.operands[0]))
    if given is None or given == []:
        return list(range(rank))
    listed = given if isinstance(given, list) else [given]
    return sorted(int(dim) % rank for dim in listed)  # type: ignore[arg-type]


def _count(op: Operation, dims: list[int]) -> int:
    return math.prod(types.shape(op.operands[0])[dim] for dim in dims)


def _mean(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    dims = _reduced_dims(op, "dim")
    value = op.operands[0]
    if types.dtype(value) != types.dtype(op.results[0]):
        (value,) = rewriter.emit("cirh.Cast", [value], types=[types.tensor_type(*_retyped(op))])
    total = sum_over(rewriter, value, dims, bool(attrs(op).get("keepdim", False)))
    return [divided(rewriter, total, _count(op, dims))]


def _retyped(op: Operation) -> types.TensorInfo:
    return types.TensorInfo(types.shape(op.operands[0]), types.dtype(op.results[0]))


def _vector_norm(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    if float(attrs(op).get("ord", 2)) != 2:  # type: ignore[arg-type]
        raise refuse(op, "is a norm over the samples of another order than 2", ONE_WAFER)
    dims = _reduced_dims(op, "dims" if op.name == "cirh.L2Norm" else "dim")
    (square,) = rewriter.emit("cirh.Mul", [op.operands[0], op.operands[0]])
    return list(rewriter.emit("cirh.Sqrt", [sum_over(rewriter, square, dims, bool(attrs(op).get("keepdim", False)))]))


def _variance(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    dims = _reduced_dims(op, "dim")
    value, count = op.operands[0], _count(op, dims)
    shape = types.shape(value)
    mean = divided(rewriter, sum_over(rewriter, value, dims, True), count)
    (distance,) = rewriter.emit("cirh.Sub", [value, spread(rewriter, mean, shape, range(len(shape)))])
    (square,) = rewriter.emit("cirh.Mul", [distance, distance])
    total = sum_over(rewriter, square, dims, bool(attrs(op).get("keepdim", False)))
    correction = attrs(op).get("correction")
    variance = divided(rewriter, total, count - (1 if correction is None else float(correction)))  # type: ignore[arg-type]
    if op.name.startswith("aten.std"):
        return list(rewriter.emit("cirh.Sqrt", [variance]))
    if op.name.startswith("aten.var_mean"):
        return [variance, *rewriter.emit("cirh.Reshape", [mean], types=[op.results[1].type])]  # type: ignore[list-item]
    return [variance]


def _nll_loss(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    attributes = attrs(op)
    total, weight = rewriter.emit(op.name, list(op.operands), {**attributes, "reduction": TOTAL})
    if len(op.operands) == 2:
        weight = _label_count(op, rewriter, attributes["ignore_index"])
    return [*rewriter.emit("cirh.Div", [total, weight]), weight]


def _label_count(op: Operation, rewriter: Rewriter, ignored: AttrValue) -> SSAValue:
    """The number of labels that count, from the labels alone: its reduction hides behind the forward pass."""
    assert isinstance(ignored, int)
    labels = op.operands[1]
    shape = types.shape(labels)
    (counts,) = rewriter.emit(
        "cirh.Compare",
        [labels, rewriter.splat(ignored, shape, types.dtype(labels))],
        {"comparison_direction": "NE"},
    )
    (numbers,) = rewriter.emit("cirh.Cast", [counts], types=[types.tensor_type(shape, types.dtype(op.results[1]))])
    return sum_over(rewriter, numbers, list(range(len(shape))), False)


def _loss(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    (total,) = rewriter.emit(op.name, list(op.operands), {**attrs(op), "reduction": TOTAL})
    return [divided(rewriter, total, math.prod(types.shape(op.operands[0])))]


def _loss_backward(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    attributes = attrs(op)
    assert attributes.get("reduction", MEAN) == MEAN
    gradient = divided(rewriter, op.operands[0], math.prod(types.shape(op.operands[1])))
    return list(rewriter.emit(op.name, [gradient, *op.operands[1:]], {**attributes, "reduction": TOTAL}))


def _addmm(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    attributes = attrs(op)
    bias, left, right = op.operands
    if attributes.get("alpha", 1) != 1 or attributes.get("beta", 1) != 1:
        raise refuse(op, "has factors (alpha, beta) and sums over the samples", ONE_WAFER)
    (product,) = rewriter.emit("cirh.MatMul", [left, right], {"transpose_a": False, "transpose_b": False})
    shape = types.shape(product)
    dims = range(len(shape) - len(types.shape(bias)), len(shape))
    return list(rewriter.emit("cirh.Add", [product, spread(rewriter, bias, shape, dims)]))


DECOMPOSITIONS: dict[str, Decomposition] = {
    "aten.mean": _mean,
    "aten.mean.dim": _mean,
    "aten.linalg_vector_norm": _vector_norm,
    "cirh.L2Norm": _vector_norm,
    "aten.var.correction": _variance,
    "aten.std.correction": _variance,
    "aten.var_mean.correction": _variance,
    "aten.nll_loss_forward": _nll_loss,
    "aten.nll_loss2d_forward": _nll_loss,
    "aten.mse_loss": _loss,
    "aten.smooth_l1_loss": _loss,
    "aten.huber_loss": _loss,
    "aten.binary_cross_entropy": _loss,
    "aten.binary_cross_entropy_with_logits": _loss,
    "aten.mse_loss_backward": _loss_backward,
    "aten.smooth_l1_loss_backward": _loss_backward,
    "aten.huber_loss_backward": _loss_backward,
    "aten.binary_cross_entropy_backward": _loss_backward,
    "aten.addmm": _addmm,
    "aten.native_layer_norm": layer_norm,
    "aten.index.Tensor": index_own,
    "aten.index_put": index_put_own,
    "aten._native_batch_norm_legit_functional": batch_norm,
    "aten._native_batch_norm_legit.no_stats": batch_norm,
    "aten.native_batch_norm_backward": batch_norm_backward,
}


def decompose(op: Operation) -> list[Operation]:
    """Puts the parts of an operation in its place, and returns them in order. Parts that nothing reads are left out."""
    rewriter = Rewriter(op)
    rewriter.replace(DECOMPOSITIONS[op.name](op, rewriter))
    for part in reversed(rewriter.made):
        if not any(result.uses for result in part.results):
            erase(part)
    return [part for part in rewriter.made if part.parent_block() is not None]
