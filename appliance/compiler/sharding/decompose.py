"""Decompositions: operations that contain a factor or a statistic of the whole batch, as several with sharding rules.

They are used only if the batch is divided: on one wafer an operation stays whole, with torch's own speed and rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import MEAN, NONE, TOTAL, Rewriter, erase
from appliance.compiler.sharding.rules.decompose_index import index_own, index_put_own
from appliance.compiler.sharding.rules.norm import CHANNELS
from appliance.compiler.sharding.rules.rule import Mixes
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs
from waferbox.cirh.table.lookup import site_of, spec

# --- Building blocks --------------------------------------------------------------------------------------------------


def sum_over(rewriter: Rewriter, value: SSAValue, dims: list[int], keepdim: bool = False) -> SSAValue:
    """The sum over some dimensions."""
    attributes: dict[str, AttrValue] = {"dimensions": dims, "keep_dims": dims if keepdim else [], "reduce_kind": "ADD"}
    return rewriter.emit("cirh.Reduce", [value], attributes)[0]


def divided(rewriter: Rewriter, value: SSAValue, divisor: float) -> SSAValue:
    """The value divided by a number."""
    constant = rewriter.splat(divisor, types.shape(value), types.dtype(value))
    return rewriter.emit("cirh.Div", [value, constant])[0]


def spread(rewriter: Rewriter, value: SSAValue, shape: Sequence[int], dims: Sequence[int]) -> SSAValue:
    """The value broadcast to a shape, in which its own dimensions are `dims`."""
    result = types.tensor_type(shape, types.dtype(value))
    return rewriter.emit("cirh.BroadcastInDim", [value], {"broadcast_dimensions": list(dims)}, types=[result])[0]


# --- Layer norm over the samples --------------------------------------------------------------------------------------


def layer_norm(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    """Results: the normalised value, its mean and the reciprocal of its standard deviation."""
    attributes = attrs(op)
    x, *weights = op.operands
    shape, dtype = types.info(x)
    if any(types.dtype(value) != dtype for value in (*op.operands, *op.results)):
        raise Mixes(f"{op.name} normalises over the samples with weights of another precision")
    dims = list(range(len(shape) - len(attributes["normalized_shape"]), len(shape)))  # type: ignore[arg-type]
    count = math.prod(shape[dim] for dim in dims)

    def mean_of(value: SSAValue) -> SSAValue:
        return divided(rewriter, sum_over(rewriter, value, dims, keepdim=True), count)

    mean = mean_of(x)
    (distance,) = rewriter.emit("cirh.Sub", [x, spread(rewriter, mean, shape, range(len(shape)))])
    variance = mean_of(rewriter.emit("cirh.Mul", [distance, distance])[0])
    epsilon = rewriter.splat(float(attributes["eps"]), types.shape(variance), dtype)  # type: ignore[arg-type]
    (scale,) = rewriter.emit("cirh.Rsqrt", rewriter.emit("cirh.Add", [variance, epsilon]))
    (value,) = rewriter.emit("cirh.Mul", [distance, spread(rewriter, scale, shape, range(len(shape)))])
    names = [name for name, count in zip(("cirh.Mul", "cirh.Add"), site_of(op).segments[1:], strict=True) if count]
    for name, weight in zip(names, weights, strict=True):
        (value,) = rewriter.emit(name, [value, spread(rewriter, weight, shape, dims)])
    return [value, mean, scale]


# --- Batch norm in training, with the statistics of the whole batch ---------------------------------------------------
#
# Forward: the mean is reduced over the wafers, then the variance around it. One reduction, of a sum of squares, would
# lose the digits of a variance that is small compared with the mean. Backward: the gradients of weight and bias are
# reduced, and the gradient of the input is made from them. Torch's kernels for evaluation do the work in between.


@dataclass(frozen=True, slots=True)
class _Norm:
    """A batch norm that is decomposed.

    Attributes:
        rewriter: takes its parts.
        operands: its operands by name.
        shape: shape of its input.
        exact: type of sums, no narrower than float32.
    """

    rewriter: Rewriter
    operands: dict[str, SSAValue]
    shape: tuple[int, ...]
    exact: torch.dtype

    @property
    def reduced(self) -> list[int]:
        return [dim for dim in range(len(self.shape)) if dim != CHANNELS]

    @property
    def count(self) -> int:
        """The number of elements of a channel in the whole batch."""
        return math.prod(self.shape[dim] for dim in self.reduced)

    def emit(self, name: str, *operands: SSAValue) -> SSAValue:
        return self.rewriter.emit(name, operands)[0]

    def kernel(self, name: str, operands: dict[str, SSAValue], attributes: dict[str, AttrValue]) -> list[SSAValue]:
        """An ATen operation; operands that are not given are absent."""
        names = [operand.name for operand in spec(name).operands]
        segments = [int(operand in operands) for operand in names]
        given = [operands[operand] for operand in names if operand in operands]
        return list(self.rewriter.emit(name, given, {**attributes, "operand_segments": segments}))

    def cast(self, value: SSAValue, dtype: torch.dtype) -> SSAValue:
        if types.dtype(value) == dtype:
            return value
        return self.rewriter.emit("cirh.Cast", [value], types=[types.tensor_type(types.shape(value), dtype)])[0]

    def number(self, value: float, like: SSAValue) -> SSAValue:
        return self.rewriter.splat(value, types.shape(like), types.dtype(like))

    def spread(self, value: SSAValue) -> SSAValue:
        """Broadcasts a value for each channel to the shape of the input."""
        return spread(self.rewriter, value, self.shape, [CHANNELS])

    def mean(self, value: SSAValue) -> SSAValue:
        return divided(self.rewriter, sum_over(self.rewriter, value, self.reduced), self.count)


def _norm(op: Operation, rewriter: Rewriter) -> _Norm:
    listed = iter(op.operands)
    counts = zip(spec(op.name).operands, site_of(op).segments, strict=True)
    operands = {operand.name: next(listed) for operand, count in counts if count}
    shape, dtype = types.info(operands["input"])
    return _Norm(rewriter, operands, shape, torch.promote_types(dtype, torch.float32))


def batch_norm(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    """Results: the normalised input, mean, 1 / deviation and, if there are running statistics, their next values."""
    norm = _norm(op, rewriter)
    attributes = attrs(op)
    epsilon, momentum = float(attributes["eps"]), float(attributes["momentum"])  # type: ignore[arg-type]
    given = norm.cast(norm.operands["input"], norm.exact)
    mean = norm.mean(given)
    # This gives the squared distance from the mean in one pass over the input.
    (square,) = rewriter.emit("aten.mse_loss", [given, norm.spread(mean)], {"reduction": NONE})
    variance = norm.mean(square)
    statistics = types.dtype(op.results[1])
    with_statistics = {
        **norm.operands,
        "running_mean": norm.cast(mean, statistics),
        "running_var": norm.cast(variance, statistics),
    }
    normalised = norm.kernel(
        "aten._native_batch_norm_legit_no_training", with_statistics, {"momentum": momentum, "eps": epsilon}
    )[0]
    rstd = norm.emit("cirh.Rsqrt", norm.emit("cirh.Add", variance, norm.number(epsilon, variance)))
    results = [normalised, norm.cast(mean, statistics), norm.cast(rstd, statistics)]
    if "running_mean" in norm.operands:
        unbiased = norm.emit("cirh.Mul", variance, norm.number(norm.count / (norm.count - 1), variance))
        results += [
            _moved(norm, norm.operands["running_mean"], mean, momentum),
            _moved(norm, norm.operands["running_var"], unbiased, momentum),
        ]
    return results


def _moved(norm: _Norm, running: SSAValue, new: SSAValue, momentum: float) -> SSAValue:
    """A running statistic, moved towards a new one."""
    new = norm.cast(new, types.dtype(running))
    old_part = norm.emit("cirh.Mul", running, norm.number(1 - momentum, running))
    return norm.emit("cirh.Add", old_part, norm.emit("cirh.Mul", new, norm.number(momentum, new)))


def batch_norm_backward(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    """Results: the gradients of input, weight and bias; empty tensors for those that the output mask excludes.

    With h the normalised input and g the gradient: dw = sum(g * h), db = sum(g), and
    dx = (g - db / n - h * dw / n) * weight / deviation.
    """
    norm = _norm(op, rewriter)
    mask = attrs(op)["output_mask"]
    assert isinstance(mask, list)
    mean, rstd = norm.operands["save_mean"], norm.operands["save_invstd"]
    # The kernel for evaluation makes both sums in one pass; 1 / (1 / deviation)^2 is the variance with epsilon in it.
    statistics = {
        "running_mean": mean,
        "running_var": norm.emit("cirh.Reciprocal", norm.emit("cirh.Mul", rstd, rstd)),
    }
    operands = {name: value for name, value in norm.operands.items() if not name.startswith("save_")}
    _, weight_gradient, bias_gradient = norm.kernel(
        op.name, {**operands, **statistics}, {"train": False, "eps": 0.0, "output_mask": [False, True, True]}
    )
    absent = rewriter.splat(0, (0,), torch.float32)
    input_gradient = _input_gradient(norm, mean, rstd, weight_gradient, bias_gradient) if mask[0] else absent
    return [input_gradient, weight_gradient if mask[1] else absent, bias_gradient if mask[2] else absent]


def _input_gradient(norm: _Norm, mean: SSAValue, rstd: SSAValue, dw: SSAValue, db: SSAValue) -> SSAValue:
    mean, rstd, dw, db = (norm.cast(value, norm.exact) for value in (mean, rstd, dw, db))
    factor = rstd
    if "weight" in norm.operands:
        factor = norm.emit("cirh.Mul", rstd, norm.cast(norm.operands["weight"], norm.exact))
    of_sample = norm.emit("cirh.Neg", norm.emit("cirh.Mul", factor, divided(norm.rewriter, db, norm.count)))
    share = norm.emit("cirh.Mul", rstd, divided(norm.rewriter, dw, norm.count))
    of_distance = norm.emit("cirh.Neg", norm.emit("cirh.Mul", factor, share))
    distance = norm.emit("cirh.Sub", norm.cast(norm.operands["input"], norm.exact), norm.spread(mean))
    through_statistics = norm.emit("aten.addcmul", norm.spread(of_sample), distance, norm.spread(of_distance))
    gradient = norm.cast(norm.operands["grad_out"], norm.exact)
    whole = norm.emit("aten.addcmul", through_statistics, gradient, norm.spread(factor))
    return norm.cast(whole, types.dtype(norm.operands["input"]))


# --- Means, norms, losses, and the table of decompositions ------------------------------------------------------------

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
    total = sum_over(rewriter, _retyped(op, rewriter), dims, bool(attrs(op).get("keepdim", False)))
    return [divided(rewriter, total, _count(op, dims))]


def _retyped(op: Operation, rewriter: Rewriter) -> SSAValue:
    """The operand in the element type of the result, which an attribute of the operation may have chosen."""
    value, dtype = op.operands[0], types.dtype(op.results[0])
    if types.dtype(value) == dtype:
        return value
    return rewriter.emit("cirh.Cast", [value], types=[types.tensor_type(types.shape(value), dtype)])[0]


def _vector_norm(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    if float(attrs(op).get("ord", 2)) != 2:  # type: ignore[arg-type]
        raise Mixes(f"{op.name} is a norm over the samples of another order than 2")
    dims = _reduced_dims(op, "dims" if op.name == "cirh.L2Norm" else "dim")
    value = _retyped(op, rewriter)
    (square,) = rewriter.emit("cirh.Mul", [value, value])
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
    """The number of labels that are not ignored.

    It is computed from the labels alone, not from the loss, so that its reduction overlaps with the forward pass.
    """
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
        raise Mixes(f"{op.name} has factors (alpha, beta) and sums over the samples")
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
    """Replaces an operation by its decomposition. Returns the new operations in order, without unused ones.

    Raises:
        Mixes: the operation has no decomposition for its attributes. It stays.
    """
    rewriter = Rewriter(op)
    try:
        rewriter.replace(DECOMPOSITIONS[op.name](op, rewriter))
    finally:
        for part in reversed(rewriter.made):
            if not any(result.uses for result in part.results):
                erase(part)
    return [part for part in rewriter.made if part.parent_block() is not None]
