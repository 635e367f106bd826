"""Products of halves are those of float32, rounded once, with and without a place to write to."""

from typing import Any

import pytest
import torch
from cirh_examples import Example

from waferbox.cirh.calls import products
from waferbox.cirh.execution.kernel import Kernel

MATRICES = {"transpose_a": False, "transpose_b": True}
BATCHED = {f"{side}_batching_dimensions": [0] for side in ("lhs", "rhs")}
BATCHED |= {"lhs_contracting_dimensions": [2], "rhs_contracting_dimensions": [1]}
CONVOLUTION: dict[str, Any] = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1]}
CONVOLUTION |= {"transposed": False, "output_padding": [0, 0], "groups": 1}
SHAPES: list[tuple[str, list[tuple[int, ...]], dict[str, Any]]] = [
    ("cirh.MatMul", [(5, 70), (6, 70)], MATRICES),
    ("cirh.DotGeneral", [(2, 5, 70), (2, 70, 6)], BATCHED),
    ("aten.addmm", [(6,), (5, 70), (70, 6)], {}),
    ("aten.bmm", [(2, 5, 70), (2, 70, 6)], {}),
    ("aten.convolution", [(2, 3, 6, 6), (4, 3, 3, 3), (4,)], CONVOLUTION),
    (
        "aten.convolution_backward",
        [(2, 4, 6, 6), (2, 3, 6, 6), (4, 3, 3, 3)],
        {**CONVOLUTION, "bias_sizes": [4], "output_mask": [True, True, True]},
    ),
]


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "shapes", "attributes"), SHAPES, ids=[name for name, _, _ in SHAPES])
def test_products_are_rounded_once(
    name: str,
    shapes: list[tuple[int, ...]],
    attributes: dict[str, Any],
    half: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "multiplies_bfloat16", lambda: False)
    torch.manual_seed(0)
    operands = [torch.randn(shape).to(half) for shape in shapes]
    wide = Kernel.build(Example(name, [x.float() for x in operands], attributes).module())
    kernel = Kernel.build(Example(name, operands, attributes).module())
    expected = [x.to(half) for x in wide([x.float() for x in operands])]
    places = [torch.empty_like(x) for x in expected]
    for results in (kernel(operands), kernel(operands, places)):
        for result, value in zip(results, expected, strict=True):
            assert torch.equal(result, value)
