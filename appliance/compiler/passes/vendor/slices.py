"""Slices of the real dialect, whose bounds are constants, as operations that have a sharding rule.

The bounds of a slice name the size of dimensions that it leaves whole, and so the size of the batch: on a wafer they
would be others. Torch's slice names one dimension.
"""

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from cirh.calls.slices import strided_place
from cirh.dialect import types
from cirh.dialect.operations import body_ops
from cirh.table.lookup import site_of


def replace_slices(module: ModuleOp) -> bool:
    """Rewrites every Slice, StridedSlice and StridedSliceGrad. Whether there were any."""
    rewrites = {"cirh.Slice": _slice, "cirh.StridedSlice": _strided_slice, "cirh.StridedSliceGrad": _grad}
    changed = False
    for op in body_ops(module):
        if op.name in rewrites:
            rewriter = Rewriter(op)
            made = rewrites[op.name](op, rewriter)
            (whole,) = rewriter.emit("cirh.Reshape", [made], types=[op.results[0].type])  # type: ignore[list-item]
            rewriter.replace([whole])
            changed = True
    return changed


def _cut(rewriter: Rewriter, value: SSAValue, parts: list[range]) -> SSAValue:
    """The elements with these numbers, in each of the first dimensions."""
    for dim, part in enumerate(parts):
        if part != range(types.shape(value)[dim]):
            place = {"dim": dim, "start": part.start, "end": part.stop, "step": part.step}
            (value,) = rewriter.emit("aten.slice.Tensor", [value], place)
    return value


def _parts(place: tuple[slice | int, ...], shape: tuple[int, ...]) -> list[range]:
    """An index as the numbers of the elements that it names."""
    parts = []
    for item, size in zip(place, shape, strict=False):
        item = slice(item % size, item % size + 1) if isinstance(item, int) else item
        parts.append(range(size)[item])
    return parts


def _slice(op: Operation, rewriter: Rewriter) -> SSAValue:
    begin = (int(number) for number in site_of(op).statics[0].tensor().reshape(-1))
    size = types.shape(op.results[0])
    parts = [range(start, start + count) for start, count in zip(begin, size, strict=True)]
    return _cut(rewriter, op.operands[0], parts)


def _strided_slice(op: Operation, rewriter: Rewriter) -> SSAValue:
    shape = types.shape(op.operands[0])
    return _cut(rewriter, op.operands[0], _parts(strided_place(site_of(op), shape, 0), shape))


def _grad(op: Operation, rewriter: Rewriter) -> SSAValue:
    """The gradient among zeros."""
    shape, dtype = types.info(op.results[0])
    parts = _parts(strided_place(site_of(op), shape, 1), shape)
    parts += [range(size) for size in shape[len(parts) :]]
    sizes = [len(part) for part in parts]
    (given,) = rewriter.emit("cirh.Reshape", [op.operands[-1]], types=[types.tensor_type(sizes, dtype)])
    low = [part.start if part else 0 for part in parts]
    between = [part.step - 1 for part in parts]
    spread = [(len(part) - 1) * part.step + 1 if part else 0 for part in parts]
    high = [whole - less - used for whole, less, used in zip(shape, low, spread, strict=True)]
    amounts = {"edge_padding_low": low, "edge_padding_high": high, "interior_padding": between}
    return rewriter.emit("cirh.pad", [given], {"padding_mode": "CONSTANT", "constant_values": [0.0], **amounts})[0]
