"""The parts of a layer norm that normalises over the samples of the batch: its sums are then reduced."""

import math
from collections.abc import Sequence

from xdsl.ir import Operation, SSAValue

from appliance.compiler.errors import refuse
from appliance.compiler.rewriter import Rewriter
from appliance.compiler.sharding.rule import ONE_WAFER
from cirh import types
from cirh.attributes import AttrValue, attrs
from cirh.table import SEGMENTS


def layer_norm(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    """The normalised value, its mean and the reciprocal of its standard deviation."""
    attributes = attrs(op)
    x, *weights = op.operands
    shape, dtype = types.info(x)
    if any(types.dtype(value) != dtype for value in (*op.operands, *op.results)):
        raise refuse(op, "normalises over the samples with weights of another precision", ONE_WAFER)
    dims = list(range(len(shape) - len(attributes["normalized_shape"]), len(shape)))  # type: ignore[arg-type]
    count = math.prod(shape[dim] for dim in dims)

    def spread(value: SSAValue, onto: Sequence[int]) -> SSAValue:
        whole = types.tensor_type(shape, dtype)
        return rewriter.emit("cirh.BroadcastInDim", [value], {"broadcast_dimensions": list(onto)}, types=[whole])[0]

    def mean_of(value: SSAValue) -> SSAValue:
        reduction: dict[str, AttrValue] = {"dimensions": dims, "keep_dims": dims, "reduce_kind": "ADD"}
        (total,) = rewriter.emit("cirh.Reduce", [value], reduction)
        return rewriter.emit("cirh.Div", [total, rewriter.splat(count, types.shape(total), dtype)])[0]

    mean = mean_of(x)
    (distance,) = rewriter.emit("cirh.Sub", [x, spread(mean, range(len(shape)))])
    variance = mean_of(rewriter.emit("cirh.Mul", [distance, distance])[0])
    epsilon = rewriter.splat(float(attributes["eps"]), types.shape(variance), dtype)  # type: ignore[arg-type]
    (scale,) = rewriter.emit("cirh.Rsqrt", rewriter.emit("cirh.Add", [variance, epsilon]))
    (value,) = rewriter.emit("cirh.Mul", [distance, spread(scale, range(len(shape)))])
    present = attributes.get(SEGMENTS, [1, 1, 1])
    assert isinstance(present, list)
    names = [name for name, count in zip(("cirh.Mul", "cirh.Add"), present[1:], strict=True) if count]
    for name, weight in zip(names, weights, strict=True):
        (value,) = rewriter.emit(name, [value, spread(weight, dims)])
    return [value, mean, scale]
