"""Rules for operations that move elements, and for views. There are no strides in CIRH: every view is a value."""

import math
from collections.abc import Sequence

import torch
from torch import fx
from xdsl.ir import SSAValue

from cstorch._internal.lowering.context import Lowering, Result, arguments_of, dtype_of, shape_of
from waferbox.cirh.dialect import types

# The largest index of a view that is no slice; the index is a constant of the module.
LARGEST_INDEX = 1 << 20


def identity(lowering: Lowering, node: fx.Node) -> SSAValue:
    return lowering.value(node.args[0])


def cast(lowering: Lowering, node: fx.Node) -> SSAValue:
    return lowering.cast(lowering.value(node.args[0]), dtype_of(node))


def copy(lowering: Lowering, node: fx.Node) -> SSAValue:
    """copy(destination, source): the source, in the destination's shape and type."""
    return lowering.operand(node.args[1], shape_of(node), dtype_of(node))


def reshape(lowering: Lowering, node: fx.Node) -> SSAValue:
    """view, unsqueeze, squeeze, ...: the shape is that of the result."""
    return lowering.reshape(lowering.value(node.args[0]), shape_of(node))


def expand(lowering: Lowering, node: fx.Node) -> SSAValue:
    return lowering.broadcast(lowering.value(node.args[0]), shape_of(node))


def transpose(lowering: Lowering, node: fx.Node) -> SSAValue:
    """t and transpose: two dimensions are swapped."""
    arguments = arguments_of(node)
    order = list(range(len(shape_of(node))))
    if order:
        first, second = arguments.get("dim0", 0), arguments.get("dim1", -1)
        order[first], order[second] = order[second], order[first]
    return lowering.transpose(lowering.value(node.args[0]), order)


def permute(lowering: Lowering, node: fx.Node) -> SSAValue:
    rank = len(shape_of(node))
    order = [dim % rank for dim in arguments_of(node)["dims"]]
    return lowering.transpose(lowering.value(node.args[0]), order)


def slice_(lowering: Lowering, node: fx.Node) -> SSAValue:
    arguments = arguments_of(node)
    value = lowering.value(node.args[0])
    if shape_of(node) == types.shape(value):
        return value
    size = types.shape(value)[arguments["dim"]]
    start, end, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(size)
    attributes = {"dim": arguments["dim"] % len(shape_of(node)), "start": start, "end": end, "step": step}
    return lowering.emit("aten.slice.Tensor", [value], attributes)


def split(lowering: Lowering, node: fx.Node) -> Result:
    """split and chunk: the sizes are those of the results."""
    value = lowering.value(node.args[0])
    axis = arguments_of(node)["dim"] % len(types.shape(value))
    sizes = [int(part.shape[axis]) for part in node.meta["val"]]
    if len(sizes) == 1:
        return (value,)
    return lowering.builder.op("cirh.Split", [value], {"split_sizes": sizes, "axis": axis}, lowering.source)


def concat(lowering: Lowering, node: fx.Node) -> SSAValue:
    arguments = arguments_of(node)
    # torch accepts empty tensors of rank 1 among others, and ignores them.
    parts = [part for part in arguments["tensors"] if shape_of(part) != (0,)] or arguments["tensors"][:1]
    operands = [lowering.cast(lowering.value(part), dtype_of(node)) for part in parts]
    if len(operands) == 1:
        return operands[0]
    return lowering.emit("cirh.Concat", operands, {"axis": arguments["dim"] % len(shape_of(node))})


def repeat(lowering: Lowering, node: fx.Node) -> SSAValue:
    """repeat: each dimension becomes (repeats, size), by a broadcast."""
    value = lowering.value(node.args[0])
    repeats = arguments_of(node)["repeats"]
    sizes = (1,) * (len(repeats) - len(types.shape(value))) + types.shape(value)
    apart = [part for pair in zip(repeats, sizes, strict=True) for part in pair]
    value = lowering.reshape(value, sizes)
    dimensions = list(range(1, len(apart), 2))
    spread = lowering.emit(
        "cirh.BroadcastInDim", [value], {"broadcast_dimensions": dimensions}, (apart, dtype_of(node))
    )
    return lowering.reshape(spread, shape_of(node))


def stack(lowering: Lowering, node: fx.Node) -> SSAValue:
    arguments = arguments_of(node)
    operands = [lowering.cast(lowering.value(part), dtype_of(node)) for part in arguments["tensors"]]
    return lowering.emit("aten.stack", operands, {"dim": arguments["dim"] % len(shape_of(node))})


def as_strided(lowering: Lowering, node: fx.Node) -> SSAValue:
    """as_strided: a view of a state that was made before the step, as some of the state's elements."""
    value = lowering.value(node.args[0])
    view = _View(lowering, node)
    flat = lowering.reshape(value, [math.prod(types.shape(value))])
    if view.contiguous:
        attributes = {"dim": 0, "start": view.offset, "end": view.offset + view.count, "step": 1}
        part = flat if view.count == types.shape(flat)[0] else lowering.emit("aten.slice.Tensor", [flat], attributes)
        return lowering.transpose(lowering.reshape(part, view.sorted_shape), view.from_sorted)
    taken = lowering.emit("aten.index_select", [flat, view.index()], {"dim": 0})
    return lowering.reshape(taken, shape_of(node))


def as_strided_scatter(lowering: Lowering, node: fx.Node) -> SSAValue:
    """as_strided_scatter: the new value of the state after a write to such a view."""
    value, source = lowering.value(node.args[0]), lowering.value(node.args[1])
    view = _View(lowering, node)
    total = math.prod(types.shape(value))
    flat = lowering.reshape(value, [total])
    if view.contiguous:
        replaced = lowering.reshape(lowering.transpose(source, view.to_sorted), [view.count])
        bounds = {"dim": 0, "start": view.offset, "end": view.offset + view.count, "step": 1}
        if view.count != total:
            replaced = lowering.emit("aten.slice_scatter", [flat, replaced], bounds)
    else:
        operands = [flat, view.index(), lowering.reshape(source, [view.count])]
        replaced = lowering.emit("aten.scatter.src", operands, {"dim": 0})
    return lowering.reshape(replaced, types.shape(value))


class _View:
    """The elements of a contiguous tensor that shape, strides and an offset select."""

    def __init__(self, lowering: Lowering, node: fx.Node) -> None:
        arguments = arguments_of(node)
        self._lowering = lowering
        self._shape: list[int] = list(arguments["size"])
        self._strides: list[int] = list(arguments["stride"])
        self.offset = int(arguments["storage_offset"] or 0)
        self.count = math.prod(self._shape)
        order = sorted(range(len(self._shape)), key=lambda dim: (-self._strides[dim], dim))
        self.to_sorted = order
        self.from_sorted = [order.index(dim) for dim in range(len(order))]
        self.sorted_shape = [self._shape[dim] for dim in order]
        self.contiguous = _is_packed(self.sorted_shape, [self._strides[dim] for dim in order])

    def index(self) -> SSAValue:
        """The positions of the elements, as a constant."""
        if self.count > LARGEST_INDEX:
            raise self._lowering.unsupported(
                f"a view of {self.count} scattered elements, made before the step", "Make the view within the step."
            )
        positions = torch.full((), self.offset, device="cpu")
        for size, stride in zip(self._shape, self._strides, strict=True):
            positions = positions[..., None] + torch.arange(size, device="cpu") * stride
        return self._lowering.builder.dense(positions.reshape(-1), self._lowering.source)


def _is_packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
