"""Rules for reading and writing elements by tensors of indices."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from xdsl.ir import Operation, SSAValue

from cstorch._internal.lowering.context import Lowering, arguments_of, shape_of
from cstorch.errors import CompileError
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import AttrValue, attrs
from waferbox.cirh.dialect.operations import Const


def index(lowering: Lowering, node: fx.Node) -> SSAValue:
    """x[i], x[:, i, j], ...: one index of integers, or several, at any dimensions."""
    value = lowering.value(node.args[0])
    indexed = _IndexedDimensions(lowering, node)
    if len(indexed.given) > 1:
        taken = lowering.emit("aten.index.Tensor", [lowering.transpose(value, indexed.to_front), *indexed.indices])
        return lowering.transpose(taken, indexed.from_front)
    (dim,), (only_index,) = indexed.given, indexed.indices
    counted = _from_the_front(lowering, only_index, types.shape(value)[dim])
    flat = lowering.reshape(counted, [math.prod(types.shape(counted))])
    taken = lowering.emit("aten.index_select", [value, flat], {"dim": dim})
    return lowering.reshape(taken, shape_of(node))


def _from_the_front(lowering: Lowering, index: SSAValue, size: int) -> SSAValue:
    """Returns the index without negative numbers, which index_select does not take."""
    shape, dtype = types.info(index)
    owner = index.owner
    if isinstance(owner, Const):
        known = owner.value.tensor()
        if bool(((known < -size) | (known >= size)).any()):
            raise CompileError(f"{lowering.source}: an index is out of bounds for a dimension of size {size}")
        return index if bool((known >= 0).all()) else lowering.builder.dense(known % size, lowering.source)
    if isinstance(owner, Operation) and owner.name == "aten.arange.start_step" and _counts_up(owner):
        return index
    zero, whole = lowering.splat(0, shape, dtype), lowering.splat(size, shape, dtype)
    is_negative = lowering.emit("cirh.Compare", [index, zero], {"comparison_direction": "LT"})
    from_the_end = lowering.emit("cirh.Add", [index, whole])
    return lowering.emit("cirh.Select", [is_negative, from_the_end, index])


def _counts_up(arange: Operation) -> bool:
    given = attrs(arange)
    numbers = (given.get("start", 0), given.get("step", 1))
    return all(isinstance(number, int) and number >= 0 for number in numbers)


def index_put(lowering: Lowering, node: fx.Node) -> SSAValue:
    """x[:, i, j] = values, or += values."""
    arguments = arguments_of(node)
    indexed = _IndexedDimensions(lowering, node)
    value = lowering.transpose(lowering.value(arguments["self"]), indexed.to_front)
    picked = [*indexed.shape, *types.shape(value)[len(indexed.given) :]]
    # Values are aligned with x[:, i, j], whose indexed dimensions are not in front.
    new = lowering.broadcast(lowering.value(arguments["values"]), [picked[dim] for dim in indexed.from_front])
    new = lowering.transpose(new, _inverse(indexed.from_front))
    attributes: dict[str, AttrValue] = {
        "accumulate": bool(arguments["accumulate"]),
        "operand_segments": [1, len(indexed.indices), 1],
    }
    put = lowering.emit("aten.index_put", [value, *indexed.indices, new], attributes)
    return lowering.transpose(put, _inverse(indexed.to_front))


class _IndexedDimensions:
    """The indexed dimensions, and the permutations to and from the order of CIRH, which has them in front."""

    def __init__(self, lowering: Lowering, node: fx.Node) -> None:
        listed: Any = arguments_of(node)["indices"]
        rank = len(shape_of(node.args[0]))
        self.given = [dim for dim, item in enumerate(listed) if item is not None]
        self.indices = [lowering.value(listed[dim]) for dim in self.given]
        self.shape = torch.broadcast_shapes(*(types.shape(item) for item in self.indices))  # type: ignore[no-untyped-call]
        others = [dim for dim in range(rank) if dim not in self.given]
        self.to_front = [*self.given, *others]
        # As in torch: the result takes the place of adjacent indices, and comes first for others.
        first, last = self.given[0], self.given[-1]
        before = first if last - first < len(self.given) else 0
        picked = len(self.shape)
        front, rest = list(range(picked)), list(range(picked, picked + len(others)))
        self.from_front = [*rest[:before], *front, *rest[before:]]


def _inverse(permutation: Sequence[int]) -> list[int]:
    return [permutation.index(dim) for dim in range(len(permutation))]
