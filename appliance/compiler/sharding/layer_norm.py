"""The parts of a layer norm that normalises over the samples of the batch: its sums are then reduced."""

import math

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import refuse
from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.sharding.rules.rule import ONE_WAFER
from appliance.compiler.sharding.sums import divided, spread, sum_over
from cirh.dialect import types
from cirh.dialect.attributes import attrs
from cirh.table.lookup import site_of


def layer_norm(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    """The normalised value, its mean and the reciprocal of its standard deviation."""
    attributes = attrs(op)
    x, *weights = op.operands
    shape, dtype = types.info(x)
    if any(types.dtype(value) != dtype for value in (*op.operands, *op.results)):
        raise refuse(op, "normalises over the samples with weights of another precision", ONE_WAFER)
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
