"""What torch's kernels take in memory while they run, beside operands and results."""

from math import prod

from xdsl.ir import Operation, SSAValue

from cirh.calls.attention import choose
from cirh.calls.half_products import is_by_float32
from cirh.calls.products import is_large_product
from cirh.dialect import types
from cirh.table.lookup import site_of

_PRODUCTS = frozenset(
    ["cirh.MatMul", "cirh.DotGeneral", "cirh.AttentionGrad"]
    + [f"aten.{name}" for name in ("addmm", "bmm", "baddbmm", "mm", "convolution", "convolution_backward")]
)


def temporary_bytes(op: Operation) -> int:
    """Of one call, at its fullest; 0 for all that take little."""
    nbytes = _library_bytes(op)
    if op.name in _PRODUCTS and any(is_by_float32(types.dtype(value)) for value in op.operands):
        # Both double, in float32.
        return 2 * (nbytes + sum(map(types.nbytes, (*op.operands, *op.results))))
    return nbytes


def _library_bytes(op: Operation) -> int:
    match op.name:
        case "aten.convolution":
            # The operand in the library's own order, then the result in both.
            return max(types.nbytes(op.operands[0]), types.nbytes(op.results[0]))
        case "aten.convolution_backward":
            gradient, operand = op.operands[:2]
            return types.nbytes(gradient) + types.nbytes(operand)
        case "cirh.MatMul" | "aten.addmm" | "aten.mm" if is_large_product(site_of(op)):
            # Both operands in the library's own order, where the wafer's processor takes that library.
            return sum(map(types.nbytes, op.operands[-2:]))
        case "cirh.Attention" if choose(site_of(op)).kernel == "products":
            query, key = op.operands[:2]
            return 2 * _scores_bytes(query, key) + types.nbytes(query)
        case "cirh.AttentionGrad" if choose(site_of(op)).kernel == "products":
            query, key = op.operands[1:3]
            return 3 * _scores_bytes(query, key) + types.nbytes(query) + types.nbytes(key)
    return 0


def _scores_bytes(query: SSAValue, key: SSAValue) -> int:
    """Of a score for each query and key."""
    return prod(types.shape(query)[:3]) * types.shape(key)[2] * types.dtype(query).itemsize
