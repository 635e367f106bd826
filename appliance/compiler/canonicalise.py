"""Canonical form: no operation that does nothing, transposes inside products, constants folded into what they become.

Without it equal updates do not look equal (compiler.md section 8), and every kernel would move data for nothing.
"""

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.rewriter import Rewriter, erase
from cirh import types
from cirh.attributes import SplatAttr, attrs
from cirh.graph import body_ops
from cirh.operations import Const


def canonicalise(module: ModuleOp) -> None:
    """Rewrites until nothing changes, then drops what nothing reads."""
    changed = True
    while changed:
        changed = False
        for op in body_ops(module):
            changed = _rewrite(op) or changed
    eliminate_dead_code(module)


def eliminate_dead_code(module: ModuleOp) -> None:
    """Drops operations whose results nothing reads; all operations are pure."""
    for op in reversed(body_ops(module)):
        if not any(result.uses for result in op.results):
            erase(op)


def _rewrite(op: Operation) -> bool:
    match op.name:
        case "cirh.Reshape" | "cirh.BroadcastInDim" | "cirh.Cast":
            return _fold_splat(op) or _drop_identity(op) or (op.name == "cirh.Reshape" and _into_source(op))
        case "cirh.Transpose":
            return _join_transposes(op)
        case "cirh.MatMul":
            return _transpose_inside_product(op)
        case _:
            return False


def _drop_identity(op: Operation) -> bool:
    if op.operands[0].type != op.results[0].type:
        return False
    Rewriter(op).replace([op.operands[0]])
    return True


def _fold_splat(op: Operation) -> bool:
    """A constant of one value stays one, whatever shape or type it is given."""
    source = op.operands[0].owner
    if not isinstance(source, Const) or not isinstance(source.value, SplatAttr):
        return False
    value = source.value.tensor().reshape(-1)[:1].to(types.dtype(op.results[0])).item()
    rewriter = Rewriter(op)
    rewriter.replace([rewriter.splat(value, types.shape(op.results[0]), types.dtype(op.results[0]))])
    return True


def _into_source(op: Operation) -> bool:
    """A reshape of a reshape is one; a reduction that keeps dimensions, only for them to be dropped, drops them."""
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


def _join_transposes(op: Operation) -> bool:
    source = op.operands[0].owner
    if not isinstance(source, Operation) or source.name != "cirh.Transpose":
        return False
    inner, outer = permutation_of(source), permutation_of(op)
    if [inner[dim] for dim in outer] != list(range(len(outer))):
        return False
    Rewriter(op).replace([source.operands[0]])
    return True


def _transpose_inside_product(op: Operation) -> bool:
    """MatMul(Transpose(x), y) reads x with transpose_a turned round."""
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
