"""Canonical form: no operations without effect, views of views joined, transposes moved into products.

It makes equal updates look equal, so that they share a kernel, and saves kernels from moving data needlessly.
"""

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.matching import made_by, number
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs, dense
from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.table.lookup import ANNOTATIONS


def canonicalise(module: ModuleOp) -> bool:
    """Rewrites operations until nothing changes. Returns whether anything changed."""
    rounds = 0
    while sum(_rewrite(op) for op in body_ops(module)):
        rounds += 1
    return rounds > 0


def _rewrite(op: Operation) -> bool:
    match op.name:
        case "cirh.Reshape" | "cirh.BroadcastInDim" | "cirh.Cast":
            return _drop_identity(op) or (op.name == "cirh.Reshape" and _into_source(op))
        case "cirh.Transpose":
            return _drop_transposes(op) or _drop_single(op)
        case "cirh.MatMul":
            return _transpose_inside_product(op)
        case "cirh.Mul" | "cirh.Div":
            return _drop_factor(op)
        case name if name in ANNOTATIONS:
            Rewriter(op).replace(list(op.operands))
            return True
        case _:
            return False


def _drop_identity(op: Operation) -> bool:
    if op.operands[0].type != op.results[0].type:
        return False
    Rewriter(op).replace([op.operands[0]])
    return True


def _drop_factor(op: Operation) -> bool:
    """Drops a product with 1, or a quotient by 1."""
    operands = list(op.operands)
    for value, factor in ((operands[0], operands[1]), (operands[1], operands[0])):
        if number(factor) == 1 and value.type == op.results[0].type:
            Rewriter(op).replace([value])
            return True
        if op.name == "cirh.Div":
            break
    return False


def _into_source(op: Operation) -> bool:
    """Joins a reshape with a reshape before it, or with a reduction that keeps dimensions which the reshape drops."""
    source = op.operands[0].owner
    if not isinstance(source, Operation):
        return False
    rewriter = Rewriter(op)
    if source.name == "cirh.Reshape":
        rewriter.replace(rewriter.emit("cirh.Reshape", [source.operands[0]], types=[op.results[0].type]))  # type: ignore[list-item]
        return True
    if source.name != "cirh.Reduce" or not attrs(source).get("keep_dims"):
        return False
    attributes = attrs(source)
    reduced = set(attributes["dimensions"])  # type: ignore[arg-type]
    kept = [size for dim, size in enumerate(types.shape(source.operands[0])) if dim not in reduced]
    if list(types.shape(op.results[0])) != kept:
        return False
    rewriter.replace(rewriter.emit("cirh.Reduce", [source.operands[0]], {**attributes, "keep_dims": []}))
    return True


def permutation_of(op: Operation) -> list[int]:
    """The permutation of a Transpose."""
    constant = op.operands[1].owner
    assert isinstance(constant, Const)
    return [int(dim) for dim in constant.value.tensor().reshape(-1).tolist()]


def _drop_transposes(op: Operation) -> bool:
    """Drops a transpose that permutes nothing, or that undoes the one before it."""
    value, permutation = op.operands[0], permutation_of(op)
    source = value.owner
    if isinstance(source, Operation) and source.name == "cirh.Transpose":
        inner = permutation_of(source)
        value, permutation = source.operands[0], [inner[dim] for dim in permutation]
    if permutation != list(range(len(permutation))):
        return False
    Rewriter(op).replace([value])
    return True


def _drop_single(op: Operation) -> bool:
    """Moves dimensions of one element by reshapes, as einsum puts them among the others and takes them out again.

    A transpose is left only if it changes the order of other dimensions, and then of those alone.
    """
    source, (result,) = op.operands[0], op.results
    shape, permutation = types.shape(source), permutation_of(op)
    others = [dim for dim in permutation if shape[dim] != 1]
    kept = sorted(others)
    if len(others) == len(permutation) or (others != kept and made_by(source, "cirh.Reshape") is None):
        return False
    rewriter = Rewriter(op)
    if others != kept:
        small = types.tensor_type([shape[dim] for dim in kept], types.dtype(source))
        (source,) = rewriter.emit("cirh.Reshape", [source], types=[small])
        order = rewriter.constant(dense(torch.tensor([kept.index(dim) for dim in others])))
        (source,) = rewriter.emit("cirh.Transpose", [source, order])
    rewriter.replace(rewriter.emit("cirh.Reshape", [source], types=[types.tensor_type(*types.info(result))]))
    return True


def _transpose_inside_product(op: Operation) -> bool:
    """Replaces MatMul(Transpose(x), y) by MatMul(x, y) with transpose_a negated."""
    attributes = attrs(op)
    operands: list[SSAValue] = list(op.operands)
    changed = False
    for index, flag in enumerate(("transpose_a", "transpose_b")):
        source = operands[index].owner
        if isinstance(source, Operation) and source.name == "cirh.Transpose" and permutation_of(source) == [1, 0]:
            operands[index] = source.operands[0]
            attributes[flag] = not attributes.get(flag, False)
            changed = True
    if changed:
        rewriter = Rewriter(op)
        rewriter.replace(rewriter.emit("cirh.MatMul", operands, attributes))
    return changed
