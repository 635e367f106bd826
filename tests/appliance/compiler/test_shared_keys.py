"""Heads of attention that share keys, instead of a copy for each head."""

from collections import Counter

import pytest
import torch

from appliance.compiler.partition.shared_keys import share_keys
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module

HEADS, KEYS, TOKENS = 6, 3, 5
QUERY, KEY = f"tensor<2x{HEADS}x{TOKENS}x4xf64>", f"tensor<2x{KEYS}x{TOKENS}x4xf64>"
SPLIT = f"tensor<2x{KEYS}x2x{TOKENS}x4xf64>"
SOURCE = f"tensor<2x{KEYS}x1x{TOKENS}x4xf64>"


def text_of(
    *, rounded: bool = False, keep_dims: bool = False, adds: str = "[2]", reads_copies: bool = False, dims: str = ""
) -> str:
    """Grouped query attention and its gradients, as models write it.

    rounded: whether the gradients of copies are rounded before they are added.
    keep_dims, adds: the sums of the gradients of copies.
    reads_copies: whether something else reads these gradients.
    dims: where the dimensions of the broadcasts' operands are; "": of operands with a dimension for the copies.
    """
    operand, where = (KEY, dims) if dims else (SOURCE, "[0, 1, 2, 3, 4]")
    total = KEY
    if adds != "[2]":
        total = f"tensor<2x2x{TOKENS}x4xf64>"
    elif keep_dims:
        total = SOURCE
    lines = []
    dense = f"dense<{where}> : tensor<{4 if dims else 5}xi64>"
    for name in ("k", "v"):
        lines += [
            f"%{name}1 = cirh.Reshape %{name} : ({KEY}) -> {operand}",
            f"%{name}2 = cirh.BroadcastInDim %{name}1 {{broadcast_dimensions = {dense}}} : ({operand}) -> {SPLIT}",
            f"%{name}3 = cirh.Reshape %{name}2 : ({SPLIT}) -> {QUERY}",
        ]
    lse = f"tensor<2x{HEADS}x{TOKENS}xf64>"
    lines += [
        "%o, %l = cirh.Attention %q, %k3, %v3 {is_causal = true, operand_segments = "
        f"dense<[1, 1, 1, 0, 0]> : tensor<5xi64>}} : ({QUERY}, {QUERY}, {QUERY}) -> ({QUERY}, {lse})",
        "%g:3 = cirh.AttentionGrad %d, %q, %k3, %v3, %o, %l {is_causal = true, operand_segments = "
        f"dense<[1, 1, 1, 1, 1, 1, 0, 0]> : tensor<8xi64>}} : ({QUERY}, {QUERY}, {QUERY}, {QUERY}, {QUERY}, {lse}) -> "
        f"({QUERY}, {QUERY}, {QUERY})",
    ]
    for index in (1, 2):
        value = f"%g#{index}"
        if rounded:
            half = QUERY.replace("f64", "f32")
            lines += [
                f"%h{index} = cirh.Cast {value} {{Truncate = false}} : {QUERY} -> {half}",
                f"%w{index} = cirh.Cast %h{index} {{Truncate = false}} : {half} -> {QUERY}",
            ]
            value = f"%w{index}"
        kept = f"dense<{adds}> : tensor<1xi64>" if keep_dims else "dense<> : tensor<0xi64>"
        lines += [
            f"%s{index} = cirh.Reshape {value} : ({QUERY}) -> {SPLIT}",
            f"%t{index} = cirh.Reduce %s{index} {{dimensions = dense<{adds}> : tensor<1xi64>, keep_dims = {kept}, "
            f'reduce_kind = "ADD"}} : ({SPLIT}) -> {total}',
        ]
    more = [("%g#1", QUERY)] if reads_copies else []
    results = [("%o", QUERY), ("%g#0", QUERY), ("%t1", total), ("%t2", total), *more]
    arguments = f"%q: {QUERY}, %k: {KEY}, %v: {KEY}, %d: {QUERY}"
    return (
        f"module {{ func @graph({arguments}) -> ({', '.join(type for _, type in results)}) {{\n"
        + "\n".join(lines)
        + f"\nreturn {', '.join(name for name, _ in results)} : {', '.join(type for _, type in results)} }} }}"
    )


def shared(text: str) -> Counter[str]:
    """Shares keys, and checks that the numbers stay. Returns how often each operation occurs then."""
    module = parse_module(text)
    changed = share_keys(module)
    verify(module)
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randn(i.shape, dtype=i.dtype, generator=generator) for i in Kernel.build(text).inputs]
    torch.testing.assert_close(Kernel(module)(batch), Kernel.build(text)(batch), rtol=1e-6, atol=1e-6)
    names = Counter(op.name for op in body_ops(module))
    assert changed
    return names


@pytest.mark.parametrize(
    "settings", [{}, {"rounded": True}, {"keep_dims": True}, {"dims": "[0, 1, 3, 4]"}], ids=lambda each: str(each)
)
def test_no_copies_are_left(settings: dict[str, object]) -> None:
    names = shared(text_of(**settings))  # type: ignore[arg-type]
    assert names["cirh.BroadcastInDim"] == names["cirh.Reduce"] == 0
    assert names["cirh.Attention"] == names["cirh.AttentionGrad"] == 1


@pytest.mark.parametrize("settings", [{"adds": "[1]"}, {"reads_copies": True}], ids=lambda each: str(each))
def test_gradients_of_copies_that_are_read_otherwise_stay(settings: dict[str, object]) -> None:
    """The forward pass alone shares keys."""
    names = shared(text_of(**settings))  # type: ignore[arg-type]
    assert names["cirh.BroadcastInDim"] == 2
    assert names["cirh.Reduce"] == 2


def test_copies_in_another_order_stay() -> None:
    """The keys are copied as a whole: a head does not share one with its neighbour."""
    joined = f"tensor<2x2x{KEYS}x{TOKENS}x4xf64>"
    text = text_of(dims="[0, 2, 3, 4]").replace(SPLIT, joined)
    module = parse_module(text.replace("dense<[2]>", "dense<[1]>"))
    verify(module)
    assert not share_keys(module)
