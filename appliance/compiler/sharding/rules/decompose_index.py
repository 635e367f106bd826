"""Decompositions of `x[torch.arange(B), i]`, by which each sample picks among its own elements.

The index names each sample by its number in the whole batch, which a wafer cannot use for its part. A gather along the
second dimension gives the same without these numbers.
"""

import math
from collections.abc import Sequence

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs


def picks_own(rows: int, indices: Sequence[SSAValue]) -> bool:
    """Whether the first of two indices counts all rows, and the second has the same number of rows, or one."""
    if len(indices) != 2:
        return False
    counter, shape = indices[0].owner, types.shape(indices[1])
    while isinstance(counter, Operation) and counter.name == "cirh.Reshape":
        counter = counter.operands[0].owner
    if not isinstance(counter, Operation) or counter.name != "aten.arange.start_step":
        return False
    attributes = attrs(counter)
    bounds = (attributes.get("start", 0), attributes.get("end"), attributes.get("step", 1))
    column = types.shape(indices[0])
    if bounds != (0, rows, 1) or column[:1] != (rows,) or any(size != 1 for size in column[1:]):
        return False
    return is_of_one_row(indices) or (shape[:1] == (rows,) and len(shape) == len(column))


def is_of_one_row(indices: Sequence[SSAValue]) -> bool:
    """Whether the second index gives the same positions for all samples."""
    column, shape = types.shape(indices[0]), types.shape(indices[1])
    return len(shape) < len(column) or (len(shape) == len(column) and shape[0] == 1 and column[0] > 1)


def index_own(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    """Makes index(x, arange, i) a gather."""
    source, counter, index = op.operands
    if is_of_one_row([counter, index]):
        places = _positive(rewriter, index, types.shape(source)[1])
        flat = types.tensor_type((math.prod(types.shape(index)),), types.dtype(index))
        (places,) = rewriter.emit("cirh.Reshape", [places], types=[flat])
        taken = rewriter.emit("aten.index_select", [source, places], {"dim": 1})
    else:
        shape = _Picked(source, index)
        taken = rewriter.emit("aten.gather", [source, shape.spread(rewriter, index)], {"dim": 1, "sparse_grad": False})
    return list(rewriter.emit("cirh.Reshape", list(taken), types=[op.results[0].type]))  # type: ignore[list-item]


def index_put_own(op: Operation, rewriter: Rewriter) -> list[SSAValue]:
    """Makes an accumulating index_put(x, arange, i, values) a scatter_add."""
    source, _, index, values = op.operands
    shape = _Picked(source, index)
    (flat,) = rewriter.emit("cirh.Reshape", [values], types=[types.tensor_type(shape.flat, types.dtype(values))])
    return list(rewriter.emit("aten.scatter_add", [source, shape.spread(rewriter, index), flat], {"dim": 1}))


class _Picked:
    """The shape of the picked elements: `count` in each row, each with the dimensions after the second."""

    def __init__(self, source: SSAValue, index: SSAValue) -> None:
        rows, self._size, *rest = types.shape(source)
        self._count = math.prod(types.shape(index)[1:])
        self.flat = (rows, self._count, *rest)

    def spread(self, rewriter: Rewriter, index: SSAValue) -> SSAValue:
        """The index in that shape; negative elements count from the end."""
        dtype = types.dtype(index)
        flat = types.tensor_type(self.flat[:2], dtype)
        (row,) = rewriter.emit("cirh.Reshape", [_positive(rewriter, index, self._size)], types=[flat])
        (spread,) = rewriter.emit(
            "cirh.BroadcastInDim",
            [row],
            {"broadcast_dimensions": [0, 1]},
            types=[types.tensor_type(self.flat, dtype)],
        )
        return spread


def _positive(rewriter: Rewriter, index: SSAValue, length: int) -> SSAValue:
    """The index with its negative elements, which count from the end, made positive."""
    whole, dtype = types.info(index)
    zero, size = rewriter.splat(0, whole, dtype), rewriter.splat(length, whole, dtype)
    (negative,) = rewriter.emit("cirh.Compare", [index, zero], {"comparison_direction": "LT"})
    (from_end,) = rewriter.emit("cirh.Add", [index, size])
    (positive,) = rewriter.emit("cirh.Select", [negative, from_end, index])
    return positive
