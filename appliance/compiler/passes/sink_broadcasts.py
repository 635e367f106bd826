"""Moves broadcasts behind element-wise operations, so that each element is computed once.

A mask that is made in the shape of all scores, (batch, heads, queries, keys), becomes a broadcast of (queries, keys).
"""

from collections.abc import Sequence
from math import prod

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.matching import broadcast_dims, made_by
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import SplatAttr, attrs, constant_of_bytes
from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.table.lookup import spec


def sink_broadcasts(module: ModuleOp) -> bool:
    """Rewrites operations in order, so that later ones see broadcasts of results. Returns whether anything changed."""
    return sum(_sink(op) for op in body_ops(module)) > 0


def _sink(op: Operation) -> bool:
    if isinstance(op, Const) or len(op.results) != 1 or not spec(op.name).pointwise:
        return False
    shape, dtype = types.info(op.results[0])
    found = [_varying(operand) for operand in op.operands]
    varying = [dims for dims in found if dims is not None]
    if len(varying) < len(found) or not any(made_by(operand, "cirh.BroadcastInDim") for operand in op.operands):
        return False
    dims = sorted(set().union(*varying))
    small = [shape[dim] for dim in dims]
    # Among operands of rank 0 torch may promote types by other rules.
    is_mixed = not dims and len({types.dtype(operand) for operand in op.operands}) > 1
    if prod(small) >= prod(shape) or is_mixed:
        return False
    rewriter = Rewriter(op)
    operands = [_narrowed(rewriter, operand, dims, small) for operand in op.operands]
    (result,) = rewriter.emit(op.name, operands, attrs(op), types=[types.tensor_type(small, dtype)])
    rewriter.replace([_broadcast(rewriter, result, dims, shape)])
    return True


def _varying(value: SSAValue) -> set[int] | None:
    """The dimensions along which the elements of a broadcast or a constant differ; None for other values."""
    if not types.shape(value) or (isinstance(value.owner, Const) and isinstance(value.owner.value, SplatAttr)):
        return set()
    op = made_by(value, "cirh.BroadcastInDim")
    return set(_spread_dims(op)) if op is not None else None


def _spread_dims(op: Operation) -> list[int]:
    """The dimensions of a broadcast's result that the source has with more than one element."""
    return [dim for dim, size in zip(broadcast_dims(op), types.shape(op.operands[0]), strict=True) if size != 1]


def _narrowed(rewriter: Rewriter, value: SSAValue, dims: Sequence[int], small: Sequence[int]) -> SSAValue:
    """The operand with these dimensions only."""
    if not types.shape(value):
        return value
    if isinstance(value.owner, Const):
        splat = value.owner.value
        assert isinstance(splat, SplatAttr)
        dtype = types.dtype(value)
        return rewriter.constant(
            constant_of_bytes(types.tensor_type(small, dtype), splat.bits.to_bytes(dtype.itemsize, "little"))
        )
    op = made_by(value, "cirh.BroadcastInDim")
    assert op is not None
    spread = _spread_dims(op)
    source: SSAValue = op.operands[0]
    sizes = [size for size in types.shape(source) if size != 1]
    if list(types.shape(source)) != sizes:
        (source,) = rewriter.emit("cirh.Reshape", [source], types=[types.tensor_type(sizes, types.dtype(source))])
    return _broadcast(rewriter, source, [dims.index(dim) for dim in spread], small)


def _broadcast(rewriter: Rewriter, value: SSAValue, dims: Sequence[int], shape: Sequence[int]) -> SSAValue:
    if list(types.shape(value)) == list(shape):
        return value
    kind = types.tensor_type(shape, types.dtype(value))
    return rewriter.emit("cirh.BroadcastInDim", [value], {"broadcast_dimensions": list(dims)}, types=[kind])[0]
