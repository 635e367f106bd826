"""Counts the floating point operations and the moved bytes of an operation, for reports and predictions.

Floating point operations are counted as torch.utils.flop_counter counts them (2 for a multiplication with its addition,
in products, convolutions and attention), with two differences: a causal mask halves attention's products, as the
kernels skip hidden scores; and an element-wise operation counts one for each element.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

from xdsl.ir import Operation, SSAValue

from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import Const

# Operations without arithmetic or bytes: the result is a view of the operand.
VIEWS: Final = frozenset(
    {
        "cirh.Reshape",
        "cirh.BroadcastInDim",
        "cirh.Transpose",
        "aten.select.int",
        "aten.slice.Tensor",
        "aten.diagonal",
        "aten.split.Tensor",
        "aten.split_with_sizes",
        "aten.unbind.int",
        "cirh.Split",
    }
)
# Operations that copy some elements of the operand: only these are read.
_LOOK_UPS: Final = frozenset(
    {"cirh.Gather", "cirh.GatherNd", "aten.embedding", "aten.gather", "aten.index.Tensor", "aten.index_select"}
)
_COPIES: Final = frozenset(
    {
        "cirh.Cast",
        "cirh.Concat",
        "cirh.Select",
        "cirh.MatrixBandPart",
        "cirh.OneHot",
        "cirh.Repeat",
        "cirh.Scatter",
        "cirh.ScatterNd",
        "cirh.pad",
        "cirh.unpad",
        "aten.cat",
        "aten.clone",
        "aten.constant_pad_nd",
        "aten.flip",
        "aten.index_put",
        "aten.masked_fill.Tensor",
        "aten.repeat",
        "aten.roll",
        "aten.scatter.src",
        "aten.scatter.value",
        "aten.select_backward",
        "aten.select_scatter",
        "aten.slice_backward",
        "aten.slice_scatter",
        "aten.stack",
        "aten.tril",
        "aten.triu",
        "aten.where.Scalar",
        "aten.where.ScalarOther",
        "aten.where.ScalarSelf",
    }
)

Shapes = Sequence[tuple[int, ...]]
Count = Callable[[Shapes, Shapes, dict[str, Any]], int]  # of operands, of results, attributes


def _matmul(operands: Shapes, results: Shapes, attributes: dict[str, Any]) -> int:
    inner = operands[0][0 if attributes.get("transpose_a") else 1]
    return 2 * prod(results[0]) * inner


def _dot_general(operands: Shapes, results: Shapes, attributes: dict[str, Any]) -> int:
    contracted = attributes["lhs_contracting_dimensions"]
    return 2 * prod(results[0]) * prod(operands[0][dimension] for dimension in contracted)


def _product(first: int) -> Count:
    """The product of operand `first`, of shape (.., m, k), with the operand after it."""
    return lambda operands, results, attributes: 2 * prod(results[0]) * operands[first][-1]


def _convolution(image: tuple[int, ...], weight: tuple[int, ...], result: tuple[int, ...], transposed: bool) -> int:
    """Each weight is used for each position of the result; transposed, for each position of the image."""
    places = image if transposed else result
    return 2 * places[0] * prod(places[2:]) * prod(weight)


def _convolution_forward(operands: Shapes, results: Shapes, attributes: dict[str, Any]) -> int:
    return _convolution(operands[0], operands[1], results[0], bool(attributes.get("transposed")))


def _convolution_backward(operands: Shapes, results: Shapes, attributes: dict[str, Any]) -> int:
    gradient, image, weight = operands[:3]
    wanted = sum(bool(flag) for flag in attributes["output_mask"][:2])
    return wanted * _convolution(image, weight, gradient, bool(attributes.get("transposed")))


def _convolution_pass(operands: Shapes, results: Shapes, attributes: dict[str, Any]) -> int:
    first, second, made = operands[0], operands[1], results[0]
    if attributes["conv_pass_direction"] == "BWD_KERNEL":
        return _convolution(first, made, second, False)
    image, output = (made, first) if attributes.get("transposed") else (first, made)
    return _convolution(image, second, output, False)


def _attention(first: int, products: int) -> Count:
    """Attention on query, key and value of shape (batch, heads, tokens, features).

    Args:
        first: index of the query among the operands. Keys and values may have fewer heads than queries.
        products: number of products for each pair of a query and a key.
    """

    def count(operands: Shapes, results: Shapes, attributes: dict[str, Any]) -> int:
        batch, heads, queries, features = operands[first]
        keys = operands[first + 1][2]
        pairs = queries * keys
        if attributes.get("is_causal"):
            begin = attributes.get("first_query", 0)
            pairs = sum(min(query + 1, keys) for query in range(begin, begin + queries))
        return products * 2 * batch * heads * pairs * features

    return count


def _linear_cross_entropy(operands: Shapes, results: Shapes, attributes: dict[str, Any]) -> int:
    (rows, features), (classes, _) = operands[:2]
    return 2 * rows * features * classes


def _linear_cross_entropy_grad(operands: Shapes, results: Shapes, attributes: dict[str, Any]) -> int:
    """The logits again, the gradient of the input, and that of the weight if it is asked for."""
    return (3 if attributes["is_trained"] else 2) * _linear_cross_entropy(operands[4:], results, attributes)


# Forward: the scores, and their product with the values. Backward: the scores again, and four gradients.
_FORWARD, _BACKWARD = 2, 5
_PRODUCTS: Final[dict[str, Count]] = {
    "cirh.MatMul": _matmul,
    "cirh.DotGeneral": _dot_general,
    "aten.mm": _product(0),
    "aten.bmm": _product(0),
    "aten.mv": _product(0),
    "aten.dot": _product(0),
    "aten.addmm": _product(1),
    "aten.addmv": _product(1),
    "aten.baddbmm": _product(1),
    "cirh.Convolution": _convolution_pass,
    "aten.convolution": _convolution_forward,
    "aten.convolution_backward": _convolution_backward,
    "cirh.Attention": _attention(0, _FORWARD),
    "cirh.LinearCrossEntropy": _linear_cross_entropy,
    "cirh.LinearCrossEntropyGrad": _linear_cross_entropy_grad,
    "cirh.AttentionGrad": _attention(1, _BACKWARD),
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention(0, _FORWARD),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention(1, _BACKWARD),
}


def is_product(op: Operation) -> bool:
    """Whether an operation is a product, convolution or attention, whose time depends on its arithmetic."""
    return op.name in _PRODUCTS


def flops(op: Operation) -> int:
    """The number of floating point operations; those on integers and booleans count, too."""
    operands = [types.shape(operand) for operand in op.operands]
    results = [types.shape(result) for result in op.results]
    count = _PRODUCTS.get(op.name)
    if count is not None:
        return count(operands, results, attrs(op))
    if isinstance(op, Const) or not operands or op.name in VIEWS or op.name in _LOOK_UPS or op.name in _COPIES:
        return 0
    return max(prod(shape) for shape in (*operands, *results))


def moved_bytes(op: Operation) -> int:
    """The number of bytes that an operation reads and writes."""
    if isinstance(op, Const) or op.name in VIEWS:
        return 0
    written = sum(types.nbytes(result) for result in op.results)
    if op.name in _LOOK_UPS:
        return 2 * written
    return written + sum(_read_bytes(operand) for operand in op.operands)


def _read_bytes(value: SSAValue) -> int:
    """The bytes that reading a value takes: none for a constant, only those of the source for a broadcast."""
    owner = value.owner
    if isinstance(owner, Const):
        return 0
    if isinstance(owner, Operation) and owner.name == "cirh.BroadcastInDim":
        return _read_bytes(owner.operands[0])
    return types.nbytes(value)
