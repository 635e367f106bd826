"""Counted arithmetic against torch's own counter, and the bytes that operations move."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from xdsl.ir import Block, Operation

from appliance.compiler.cost.flops import flops, is_product, moved_bytes
from waferbox.cirh.dialect.attributes import attribute
from waferbox.cirh.dialect.operations import Const, body_ops, operation_class
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder

CONVOLUTION = {"stride": [2, 1], "padding": [1, 0], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0]}
TRANSPOSED = {**CONVOLUTION, "transposed": True}
BATCHED = {
    "lhs_batching_dimensions": [0],
    "rhs_batching_dimensions": [0],
    "lhs_contracting_dimensions": [2],
    "rhs_contracting_dimensions": [2],
}


def single(name: str, shapes: Sequence[Sequence[int]], attributes: Mapping[str, Any]) -> tuple[Operation, Kernel]:
    """One operation on float32 tensors, and a kernel of it alone."""
    builder = GraphBuilder()
    operands = [builder.argument(tensor_type(shape, torch.float32)) for shape in shapes]
    results = builder.op(name, operands, attributes)
    module = builder.finish([(value, None) for value in results])
    return next(op for op in body_ops(module) if not isinstance(op, Const)), Kernel.build(module)


@pytest.mark.parametrize(
    ("name", "shapes", "attributes"),
    [
        ("cirh.MatMul", [(3, 5), (5, 7)], {}),
        ("cirh.MatMul", [(5, 3), (7, 5)], {"transpose_a": True, "transpose_b": True}),
        ("cirh.DotGeneral", [(2, 3, 5), (2, 7, 5)], BATCHED),
        ("aten.mm", [(3, 5), (5, 7)], {}),
        ("aten.bmm", [(2, 3, 5), (2, 5, 7)], {}),
        ("aten.addmm", [(7,), (3, 5), (5, 7)], {}),
        ("aten.baddbmm", [(2, 3, 7), (2, 3, 5), (2, 5, 7)], {}),
        ("aten.convolution", [(2, 4, 9, 8), (6, 4, 3, 2), (6,)], {**CONVOLUTION, "groups": 1}),
        ("aten.convolution", [(2, 4, 9, 8), (6, 2, 3, 2), (6,)], {**CONVOLUTION, "groups": 2}),
        ("aten.convolution", [(2, 4, 9, 8), (4, 6, 3, 2), (6,)], {**TRANSPOSED, "groups": 1}),
        (
            "aten.convolution_backward",
            [(2, 6, 5, 7), (2, 4, 9, 8), (6, 4, 3, 2)],
            {**CONVOLUTION, "groups": 1, "bias_sizes": [6], "output_mask": [True, True, True]},
        ),
        (
            "aten.convolution_backward",
            [(2, 6, 5, 7), (2, 4, 9, 8), (6, 4, 3, 2)],
            {**CONVOLUTION, "groups": 1, "bias_sizes": [6], "output_mask": [False, True, False]},
        ),
    ],
)
def test_products_and_convolutions_as_torch_counts_them(
    name: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any]
) -> None:
    op, kernel = single(name, shapes, attributes)
    with FlopCounterMode(display=False) as counter:
        kernel([torch.randn(shape) for shape in shapes])
    assert flops(op) == counter.get_total_flops() > 0
    assert is_product(op)


def attention(name: str, shapes: Sequence[tuple[int, ...]], results: int, **attributes: Any) -> Operation:
    block = Block(arg_types=[tensor_type(shape, torch.float32) for shape in shapes])
    types = [tensor_type(shapes[0], torch.float32)] * results
    given = {key: attribute(value) for key, value in attributes.items()}
    return operation_class(name).create(operands=list(block.args), result_types=types, attributes=given)


QUERY, KEY = (2, 6, 10, 8), (2, 3, 12, 8)  # each head of the keys serves two of the queries


@pytest.mark.parametrize("name", ["cirh.Attention", "aten._scaled_dot_product_flash_attention_for_cpu"])
def test_attention_forward(name: str) -> None:
    whole = flops(attention(name, [QUERY, KEY, KEY], 2, is_causal=False))
    assert whole == sdpa_flop_count(QUERY, KEY, KEY)
    causal = flops(attention(name, [QUERY, KEY, KEY], 2, is_causal=True))
    assert causal * QUERY[2] * KEY[2] == whole * sum(range(1, QUERY[2] + 1))
    square = flops(attention(name, [KEY, KEY, KEY], 2, is_causal=True))
    assert square * 2 * 12 == sdpa_flop_count(KEY, KEY, KEY) * 13


def test_parts_of_the_queries_attend_as_all_do() -> None:
    part = (KEY[0], KEY[1], 4, KEY[3])
    parts = [attention("cirh.Attention", [part, KEY, KEY], 2, is_causal=True, first_query=n) for n in (0, 4, 8)]
    assert sum(map(flops, parts)) == flops(attention("cirh.Attention", [KEY, KEY, KEY], 2, is_causal=True))


@pytest.mark.parametrize("name", ["cirh.AttentionGrad", "aten._scaled_dot_product_flash_attention_for_cpu_backward"])
def test_attention_backward(name: str) -> None:
    op = attention(name, [QUERY, QUERY, KEY, KEY, QUERY], 3, is_causal=False)
    assert flops(op) == sdpa_backward_flop_count(QUERY, QUERY, KEY, KEY)


def test_what_goes_element_by_element() -> None:
    add, _ = single("cirh.Add", [(4, 6), (4, 6)], {})
    assert (flops(add), moved_bytes(add), is_product(add)) == (24, 3 * 24 * 4, False)
    mean, _ = single("aten.mean", [(4, 6)], {})
    assert (flops(mean), moved_bytes(mean)) == (24, 25 * 4)
    join, _ = single("cirh.Concat", [(4, 6), (2, 6)], {"axis": 0})
    assert (flops(join), moved_bytes(join)) == (0, 2 * 36 * 4)
    some, _ = single("aten.slice.Tensor", [(4, 6)], {"dim": 0, "start": 1, "end": 3})
    assert (flops(some), moved_bytes(some)) == (0, 0)


def test_a_broadcast_is_read_for_what_it_is_of() -> None:
    builder = GraphBuilder()
    x = builder.argument(tensor_type((4, 6), torch.float32))
    bias = builder.argument(tensor_type((6,), torch.float32))
    wide = tensor_type((4, 6), torch.float32)
    (whole,) = builder.op("cirh.BroadcastInDim", [bias], {"broadcast_dimensions": [1]}, types=[wide])
    (result,) = builder.op("cirh.Add", [x, whole])
    *_, add = body_ops(builder.finish([(result, None)]))
    assert moved_bytes(add) == (24 + 6 + 24) * 4
