"""Sums and means, of which decompositions are made."""

from collections.abc import Sequence

from xdsl.ir import SSAValue

from appliance.compiler.core.rewriter import Rewriter
from cirh.dialect import types
from cirh.dialect.attributes import AttrValue


def sum_over(rewriter: Rewriter, value: SSAValue, dims: list[int], keepdim: bool = False) -> SSAValue:
    """The sum over some dimensions."""
    attributes: dict[str, AttrValue] = {"dimensions": dims, "keep_dims": dims if keepdim else [], "reduce_kind": "ADD"}
    return rewriter.emit("cirh.Reduce", [value], attributes)[0]


def divided(rewriter: Rewriter, value: SSAValue, divisor: float) -> SSAValue:
    """The value divided by a number."""
    constant = rewriter.splat(divisor, types.shape(value), types.dtype(value))
    return rewriter.emit("cirh.Div", [value, constant])[0]


def spread(rewriter: Rewriter, value: SSAValue, shape: Sequence[int], dims: Sequence[int]) -> SSAValue:
    """The value repeated to a shape, in which its own dimensions are `dims`."""
    result = types.tensor_type(shape, types.dtype(value))
    return rewriter.emit("cirh.BroadcastInDim", [value], {"broadcast_dimensions": list(dims)}, types=[result])[0]
