"""Replaces divisions, gathers, slices and pools of the vendor's client by torch's, which have sharding rules."""

from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from waferbox.cirh.calls.picking import picks_elements
from waferbox.cirh.calls.slices import strided_place
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.table.lookup import site_of

# --- Integer division -------------------------------------------------------------------------------------------------
#
# The client writes Div for `//` and `%` of integers. Div rounds to zero, torch rounds down, which differs for negative
# numbers. The location of the operation names the original one.

_ROUND_DOWN: Final = ("aten::floor_divide", "aten::remainder")


def replace_floor_divisions(module: ModuleOp) -> bool:
    """Replaces each Div of integers that torch rounds down. Returns whether there were any."""
    changed = False
    for op in body_ops(module):
        if op.name != "cirh.Div" or types.dtype(op.results[0]).is_floating_point:
            continue
        if source_of(op).op in _ROUND_DOWN:
            rewriter = Rewriter(op)
            rewriter.replace(rewriter.emit("aten.floor_divide", list(op.operands)))
            changed = True
    return changed


# --- torch.gather -----------------------------------------------------------------------------------------------------
#
# The client writes torch.gather like a Gather that takes whole rows. They differ in the shape of the result: that of
# torch.gather is the shape of the indices.


def replace_gathers(module: ModuleOp) -> bool:
    """Replaces each Gather that picks single elements. Returns whether there were any."""
    changed = False
    for op in body_ops(module):
        if op.name == "cirh.Gather" and picks_elements(site_of(op)):
            rewriter = Rewriter(op)
            source, indices = op.operands
            long = types.tensor_type(types.shape(indices), torch.int64)
            (places,) = rewriter.emit("cirh.Cast", [indices], types=[long])
            place = {"dim": attrs(op).get("axis", 0), "sparse_grad": False}
            rewriter.replace(rewriter.emit("aten.gather", [source, places], place))
            changed = True
    return changed


# --- Slices -----------------------------------------------------------------------------------------------------------
#
# The bounds of a slice are constants that include the sizes of whole dimensions, such as the batch, which differ on a
# wafer. Torch's slice has the bounds of one dimension.


def replace_slices(module: ModuleOp) -> bool:
    """Replaces each Slice, StridedSlice and StridedSliceGrad. Returns whether there were any."""
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
    """Slices the first dimensions to these elements."""
    for dim, part in enumerate(parts):
        if part != range(types.shape(value)[dim]):
            place = {"dim": dim, "start": part.start, "end": part.stop, "step": part.step}
            (value,) = rewriter.emit("aten.slice.Tensor", [value], place)
    return value


def _parts(place: tuple[slice | int, ...], shape: tuple[int, ...]) -> list[range]:
    """The numbers of the elements that an index names, in each dimension."""
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
    """The gradient of a strided slice: the given one, padded with zeros."""
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


# --- Adaptive pooling -------------------------------------------------------------------------------------------------
#
# Torch's windows differ in size if the sizes do not divide evenly; the client writes windows of equal size, although
# its own CPU backend pools as torch does. The location of the operation names the original one.

_ADAPTIVE = "adaptive_avg_pool"
_RANK = 5  # the client writes all pooling with samples, channels, and three dimensions, some of which are 1


def replace_uneven_pools(module: ModuleOp) -> bool:
    """Replaces each mean over windows of uneven sizes. Returns whether there were any."""
    changed = False
    for op in body_ops(module):
        if op.name == "cirh.Pool" and _is_uneven(op):
            rewriter = Rewriter(op)
            rewriter.replace([_adaptive(op, rewriter)])
            changed = True
    return changed


def _is_uneven(op: Operation) -> bool:
    if attrs(op)["pool_type"] != "AVERAGE" or _ADAPTIVE not in source_of(op).op:
        return False
    image, made = types.shape(op.operands[0]), types.shape(_pooled(op))
    return len(image) == _RANK and any(size % count for size, count in zip(image[2:], made[2:], strict=True))


def _pooled(op: Operation) -> SSAValue:
    """The value of the pooled size: the result, or the gradient by it."""
    return op.operands[1] if attrs(op).get("gradient") else op.results[0]


def _adaptive(op: Operation, rewriter: Rewriter) -> SSAValue:
    image, gradient = op.operands
    dtype = types.dtype(image)
    exact = torch.promote_types(dtype, torch.float32)
    if attrs(op).get("gradient"):
        operands = [_cast(rewriter, gradient, exact), _cast(rewriter, image, exact)]
        (made,) = rewriter.emit("aten._adaptive_avg_pool3d_backward", operands)
    else:
        size = {"output_size": list(types.shape(op.results[0])[2:])}
        (made,) = rewriter.emit("aten._adaptive_avg_pool3d", [_cast(rewriter, image, exact)], size)
    return _cast(rewriter, made, dtype)


def _cast(rewriter: Rewriter, value: SSAValue, dtype: torch.dtype) -> SSAValue:
    shape, given = types.info(value)
    if given is dtype:
        return value
    return rewriter.emit("cirh.Cast", [value], types=[types.tensor_type(shape, dtype)])[0]
