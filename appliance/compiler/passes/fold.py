"""Constant folding: replaces operations on constants by their results.

Constants of equal elements stay so whatever their shape, so the text does not grow. Others are folded only up to a few
elements and only if the result is no larger: tensors would bloat the text, and a wafer cannot take its part of a
constant with written-out elements.
"""

import math
from typing import Final

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from appliance.compiler.core.rewriter import Rewriter
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import ConstantAttr, SplatAttr, constant_of_bytes, dense
from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.table.lookup import build, runtime_operands

# The most elements of a folded constant whose elements differ.
LARGEST: Final = 64
_MOVES: Final = frozenset({"cirh.Reshape", "cirh.BroadcastInDim", "cirh.Transpose"})
# Operations with exactly one correct result, so that folding gives the same bits as any kernel.
_EXACT: Final = frozenset(
    f"cirh.{name}"
    for name in (
        *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Sign", "Floor", "Ceil"),
        *("And", "Or", "Xor", "Not", "Compare", "Select", "Cast"),
    )
)


def fold_constants(module: ModuleOp) -> bool:
    """Folds operations in order, so that later ones see folded operands. Returns whether anything was folded."""
    changed = False
    for op in body_ops(module):
        folded = _folded(op)
        if folded is not None:
            rewriter = Rewriter(op)
            rewriter.replace([rewriter.constant(folded)])
            changed = True
    return changed


def _folded(op: Operation) -> ConstantAttr | None:
    if op.name not in _MOVES and not (op.name in _EXACT and _is_exact(op)):
        return None
    constants = [value.owner.value for value in runtime_operands(op) if isinstance(value.owner, Const)]
    if len(constants) != len(runtime_operands(op)):
        return None
    size = math.prod(types.shape(op.results[0]))
    if size and all(isinstance(constant, SplatAttr) for constant in constants):
        ones = [_one(constant) for constant in constants]
        element = dense(ones[0] if op.name in _MOVES else build(op).function(*ones))
        assert isinstance(element, SplatAttr)
        kind = types.tensor_type(*types.info(op.results[0]))
        return constant_of_bytes(kind, element.bits.to_bytes(types.dtype(kind).itemsize, "little"))
    if size <= LARGEST and size <= max(math.prod(types.shape(constant.type)) for constant in constants):
        return dense(build(op).function(*[constant.tensor() for constant in constants]))
    return None


def _is_exact(op: Operation) -> bool:
    """Whether the result is exact: not if an integer cannot hold it, nor for integer division or mixed precisions."""
    operands = {types.dtype(operand) for operand in op.operands if types.dtype(operand) is not torch.bool}
    result = types.dtype(op.results[0])
    if op.name == "cirh.Cast":
        return (
            result.is_floating_point or result is torch.bool or not any(dtype.is_floating_point for dtype in operands)
        )
    return len(operands) < 2 and not (op.name == "cirh.Div" and not result.is_floating_point)


def _one(constant: ConstantAttr) -> torch.Tensor:
    """One element of a constant, of rank 0 if the constant has rank 0, else of rank 1."""
    whole = constant.tensor()
    return whole.reshape(-1)[0].reshape((1,) * min(whole.dim(), 1))
