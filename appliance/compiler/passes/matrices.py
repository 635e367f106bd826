"""Matrices of batches, and their products, as patterns see them: behind reshapes and transposes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.canonicalise import permutation_of
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs, dense


@dataclass(frozen=True, slots=True)
class Matrix:
    """Matrices: the last two dimensions of `base`, exchanged if `swapped`. The other dimensions number them."""

    base: SSAValue
    swapped: bool = False

    @property
    def transposed(self) -> "Matrix":
        """The same with rows and columns exchanged."""
        return Matrix(self.base, not self.swapped)

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        rows, columns = types.shape(self.base)[-2:]
        return (columns, rows) if self.swapped else (rows, columns)

    def shaped(self, rewriter: Rewriter, leading: tuple[int, ...]) -> SSAValue:
        """The matrices as a value whose other dimensions have these sizes."""
        value = self.base
        shape, dtype = types.info(value)
        if shape[:-2] != leading:
            (value,) = rewriter.emit("cirh.Reshape", [value], types=[types.tensor_type((*leading, *shape[-2:]), dtype)])
        return swap_last(rewriter, value) if self.swapped else value


def swap_last(rewriter: Rewriter, value: SSAValue) -> SSAValue:
    """The value with its last two dimensions exchanged."""
    permutation = rewriter.constant(dense(torch.tensor(_swap(len(types.shape(value))))))
    return rewriter.emit("cirh.Transpose", [value, permutation])[0]


def _swap(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _step(op: Operation) -> bool | None:
    """Whether a view exchanges rows and columns; None if it changes the matrices otherwise."""
    if op.name not in ("cirh.Reshape", "cirh.Transpose"):
        return None
    before, after = types.shape(op.operands[0]), types.shape(op.results[0])
    if op.name == "cirh.Reshape" and len(before) > 2 and len(after) > 2 and before[-2:] == after[-2:]:
        return False
    if op.name == "cirh.Transpose" and len(before) > 2 and permutation_of(op) == _swap(len(before)):
        return True
    return None


def matrix_of(value: SSAValue) -> Matrix:
    """The matrices that a value shows."""
    swapped = False
    while isinstance(value.owner, Operation):
        step = _step(value.owner)
        if step is None:
            break
        swapped ^= step
        value = value.owner.operands[0]
    return Matrix(value, swapped)


@dataclass(frozen=True, slots=True)
class Reader:
    """An operation that reads matrices, as the operand of this index, behind views that exchanged them or not."""

    op: Operation
    index: int
    swapped: bool


def readers(value: SSAValue, swapped: bool = False) -> Iterator[Reader]:
    """Yields all operations that read the matrices of a value, looking through views."""
    for use in value.uses:
        step = _step(use.operation) if use.index == 0 else None
        if step is None:
            yield Reader(use.operation, use.index, swapped)
        else:
            yield from readers(use.operation.results[0], swapped ^ step)


@dataclass(frozen=True, slots=True)
class Product:
    """left @ right, for matrices of each batch and head."""

    op: Operation
    left: Matrix
    right: Matrix


def product_by(op: object) -> Product | None:
    """The product that an operation computes, if it computes one."""
    if not isinstance(op, Operation):
        return None
    if op.name == "aten.bmm":
        return Product(op, matrix_of(op.operands[0]), matrix_of(op.operands[1]))
    if op.name != "cirh.DotGeneral":
        return None
    attributes = attrs(op)
    left, right = op.operands
    batched = attributes["lhs_batching_dimensions"] == attributes["rhs_batching_dimensions"] == [0, 1]
    if not batched or not len(types.shape(left)) == len(types.shape(right)) == 4:
        return None
    by_rows, by_columns = attributes["lhs_contracting_dimensions"], attributes["rhs_contracting_dimensions"]
    of_left, of_right = matrix_of(left), matrix_of(right)
    return Product(
        op,
        of_left.transposed if by_rows == [2] else of_left,
        of_right.transposed if by_columns == [3] else of_right,
    )
