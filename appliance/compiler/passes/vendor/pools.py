"""Adaptive pooling as the vendor's client writes it, with the windows that torch has.

Torch's windows differ in size where the sizes do not divide; the client writes windows of one size. Its own CPU backend
has torch's. What the operation was in torch is in its location.
"""

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.rewriter import Rewriter
from cirh.dialect import types
from cirh.dialect.attributes import attrs
from cirh.dialect.locations import source_of
from cirh.dialect.operations import body_ops

_ADAPTIVE = "adaptive_avg_pool"
_RANK = 5  # as the client writes all pooling: samples, channels, and three dimensions of which some are 1


def replace_uneven_pools(module: ModuleOp) -> bool:
    """Rewrites every mean over windows that torch has in different sizes. Whether there were any."""
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
    """The value of the size that pooling makes: its result, or the gradient by that."""
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
