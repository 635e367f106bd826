"""Attention that is written out: fused where nobody reads what lies within it, and then with the same values."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Traced, loss_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.fold import fold_constants
from appliance.compiler.passes.fuse_attention import fuse_attention
from appliance.compiler.passes.known_masks import KnownValues
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

pytestmark = pytest.mark.parity

LOC = Source(module="h.0", op="matmul", file="model.py", line=7)
F64 = torch.float64
Q, K = (2, 3, 4, 5), (2, 3, 6, 5)


class Attention(GraphBuilder):
    """Products as torch traces them, or as the real client prints them."""

    def one(self, name: str, *operands: SSAValue, **attributes: Any) -> SSAValue:
        return self.op(name, operands, attributes, LOC)[0]

    def reshape(self, value: SSAValue, *shape: int) -> SSAValue:
        return self.op("cirh.Reshape", [value], None, LOC, types=[tensor_type(shape, F64)])[0]

    def product(self, a: SSAValue, b: SSAValue, shape: tuple[int, ...], inner: int, general: bool) -> SSAValue:
        if general:
            return self.one(
                "cirh.DotGeneral",
                a,
                b,
                lhs_batching_dimensions=[0, 1],
                rhs_batching_dimensions=[0, 1],
                lhs_contracting_dimensions=[3],
                rhs_contracting_dimensions=[2],
            )
        n, _, rows, columns = shape[0] * shape[1], *shape[1:]
        product = self.one("aten.bmm", self.reshape(a, n, rows, inner), self.reshape(b, n, inner, columns))
        return self.reshape(product, *shape)

    def spread(self, value: SSAValue, shape: tuple[int, ...], dims: list[int], dtype: torch.dtype) -> SSAValue:
        types = [tensor_type(shape, dtype)]
        return self.op("cirh.BroadcastInDim", [value], {"broadcast_dimensions": dims}, LOC, types=types)[0]


def compared(module: ModuleOp, inputs: list[torch.Tensor], *, fuses: bool) -> dict[str, Any]:
    verify(module)
    expected = Kernel.build(module)(inputs)
    before = print_module(module)
    assert fuse_attention(module) is fuses, before
    assert (print_module(module) != before) is fuses
    verify(module)
    assert not fuse_attention(module)
    for made, value in zip(Kernel.build(module)(inputs), expected, strict=True):
        torch.testing.assert_close(made, value, rtol=1e-12, atol=1e-12)
    found = [op for op in body_ops(module) if op.name == "cirh.Attention"]
    assert len(found) == fuses
    if not found:
        return {}
    assert source_of(found[0]) == LOC
    return attrs(found[0])


@settings(max_examples=80, database=None, derandomize=True)
@given(
    general=st.booleans(),
    scale=st.sampled_from(["mul", "mul-swapped", "div", "none"]),
    mask=st.sampled_from(["none", "add", "add-swapped", "add-rows", "hide", "show"]),
    known=st.booleans(),
    square=st.booleans(),
    transposed=st.booleans(),
    read=st.sampled_from(["nothing", "nothing", "scores", "scaled", "masked", "weights"]),
)
def test_attention(
    general: bool, scale: str, mask: str, known: bool, square: bool, transposed: bool, read: str
) -> None:
    graph = Attention()
    key_shape = Q if square else K
    tokens = (Q[2], key_shape[2])
    shape = (*Q[:2], *tokens)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (graph.argument(tensor_type(s, F64)) for s in (Q, (*key_shape[:2], 5, tokens[1]), key_shape))
    inputs = [torch.randn(s, dtype=F64, generator=generator) for s in (Q, (*key_shape[:2], 5, tokens[1]), key_shape)]
    if transposed:
        k = graph.argument(tensor_type(key_shape, F64))
        inputs.append(torch.randn(key_shape, dtype=F64, generator=generator))
        k = graph.one("cirh.Transpose", k, graph.dense(torch.tensor([0, 1, 3, 2])))
    scores = graph.product(q, k, shape, 5, general)
    scaled = {
        "mul": lambda: graph.one("cirh.Mul", scores, graph.splat(0.3, shape, F64)),
        "mul-swapped": lambda: graph.one("cirh.Mul", graph.splat(0.3, shape, F64), scores),
        "div": lambda: graph.one("cirh.Div", scores, graph.splat(2.0, shape, F64)),
        "none": lambda: scores,
    }[scale]()
    masked = scaled
    if mask in ("hide", "show"):
        shown = torch.ones(tokens, dtype=torch.bool).tril()
        condition = shown if mask == "show" else ~shown
        if known:
            value = graph.dense(condition)
        else:
            value = graph.argument(tensor_type(tokens, torch.bool))
            inputs.append(condition)
        wide = graph.spread(value, shape, [2, 3], torch.bool)
        nothing = graph.splat(-math.inf, shape, F64)
        masked = graph.one("cirh.Select", wide, *((scaled, nothing) if mask == "show" else (nothing, scaled)))
    elif mask != "none":
        added = torch.randn(tokens, dtype=F64, generator=generator)
        rows = mask == "add-rows"
        value = graph.argument(tensor_type((2, 1, *tokens) if rows else tokens, F64))
        inputs.append(added.expand(2, 1, *tokens).clone() if rows else added)
        wide = graph.spread(value, shape, [0, 1, 2, 3] if rows else [2, 3], F64)
        masked = graph.one("cirh.Add", *((wide, scaled) if mask == "add-swapped" else (scaled, wide)))
    weights = graph.one("cirh.Softmax", masked, axis=3)
    output = graph.product(weights, v, Q, tokens[1], general)
    also = {"scores": scores, "scaled": scaled, "masked": masked, "weights": weights}
    results = [output, *([also[read]] if read in also else [])]
    attributes = compared(graph.finish([(value, None) for value in results]), inputs, fuses=read == "nothing")
    if attributes:
        assert attributes["scale"] == {"mul": 0.3, "mul-swapped": 0.3, "div": 0.5, "none": 1.0}[scale]
        assert attributes["is_causal"] is (mask in ("hide", "show") and known and square)


def masked_module(mask: torch.Tensor | None, fill: float) -> tuple[ModuleOp, list[torch.Tensor]]:
    """mask: known when it is compiled; None: an input."""
    graph, shape = Attention(), (*Q[:2], 4, 4)
    inputs = [torch.randn(Q, dtype=F64, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    q, k, v = (graph.argument(tensor_type(Q, F64)) for _ in range(3))
    swapped = graph.one("cirh.Transpose", k, graph.dense(torch.tensor([0, 1, 3, 2])))
    if mask is None:
        condition = graph.argument(tensor_type((4, 4), torch.bool))
        inputs.append(torch.eye(4, dtype=torch.bool))
    else:
        condition = graph.dense(mask)
    wide = graph.spread(condition, shape, [2, 3], torch.bool)
    scores = graph.product(q, swapped, shape, 5, False)
    masked = graph.one("cirh.Select", wide, graph.splat(fill, shape, F64), scores)
    output = graph.product(graph.one("cirh.Softmax", masked, axis=3), v, Q, 4, False)
    return graph.finish([(output, None)]), inputs


def test_a_mask_that_hides_all_keys_by_a_number_stays() -> None:
    lowest = torch.finfo(F64).min
    later = torch.ones(4, 4, dtype=torch.bool).triu(1)
    everything = later.clone()
    everything[2] = True
    assert compared(*masked_module(later, lowest), fuses=True)["is_causal"]
    assert not compared(*masked_module(later.flip(0), lowest), fuses=True)["is_causal"]
    compared(*masked_module(everything, lowest), fuses=False)
    # It cannot be known what this one will hide.
    compared(*masked_module(None, lowest), fuses=False)
    compared(*masked_module(None, -math.inf), fuses=True)
    # A number that scores may well be below.
    compared(*masked_module(later, -10.0), fuses=False)


def test_what_is_known_is_bounded_and_computed_once() -> None:
    graph = GraphBuilder()
    (large,) = graph.op("cirh.Neg", [graph.splat(1.0, (1 << 13, 1 << 13), F64)])
    chain = small = graph.splat(1.0, (2, 2), F64)
    for _ in range(40):
        (chain,) = graph.op("cirh.Add", [chain, chain])
    (two,) = graph.op("cirh.Add", [small, small])
    made = graph.op("cirh.Add", [two, graph.argument(tensor_type((2, 2), F64))])
    graph.finish([(value, None) for value in (large, chain, two, *made)])
    known = KnownValues()
    assert known.get(made[0]) is None
    assert known.get(chain) is None
    found = known.get(two)
    assert found is not None
    assert found.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert known.get(two) is found
    assert known.get(large) is None


# -- traced


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        parts = self.project(x).view(batch, tokens, 3, 2, 3).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril().logical_not()
        scores = (q @ k.transpose(-2, -1) / math.sqrt(3)).masked_fill(later, -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, 6)


def prepared(text: str) -> ModuleOp:
    module = parse_module(text)
    canonicalise(module)
    fold_constants(module)
    return module


def test_traced_attention_on_wafers() -> None:
    def build(model: Any) -> Callable[[Any], Any]:
        def step(batch: Any) -> Any:
            with torch.no_grad():
                return model(batch)

        return step

    batches = [torch.randn(BATCH, 4, 6, generator=torch.Generator().manual_seed(n)).double() for n in range(2)]
    traced = Traced(build, Heads(), batches[0])
    module = prepared(traced.text)
    assert fuse_attention(module)
    (fused,) = [op for op in body_ops(module) if op.name == "cirh.Attention"]
    assert attrs(fused)["is_causal"]
    traced.check(batches, [(1, 1), (2, 1), (3, 2)])


def test_attention_with_a_backward_pass() -> None:
    def build(model: Any) -> Callable[[Any], Any]:
        def step(batch: Any) -> Any:
            return loss_and_gradients(model, model(batch).square().sum())

        return step

    batch = torch.randn(BATCH, 4, 6, generator=torch.Generator().manual_seed(1)).double()
    traced = Traced(build, Heads(), batch)
    module = prepared(traced.text)
    assert fuse_attention(module)
    assert [op.name for op in body_ops(module) if "ttention" in op.name] == ["cirh.Attention", "cirh.AttentionGrad"]
    traced.check([batch], [(1, 1), (2, 1)])


@pytest.mark.parametrize("masked", [False, True])
def test_samples_that_ask_what_is_the_same_for_all(masked: bool) -> None:
    """It works on several wafers as it is written, and so it must when it is fused."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys = nn.Parameter(torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(1)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.view(1, BATCH, 2, 3).transpose(1, 2)
            scores = q @ self.keys.transpose(-2, -1)
            if masked:
                scores = scores + x.sum(1).view(1, 1, BATCH, 1)
            return (scores.softmax(-1) @ self.keys).transpose(1, 2).reshape(BATCH, 6)

    def build(model: Any) -> Callable[[Any], Any]:
        def step(batch: Any) -> Any:
            with torch.no_grad():
                return model(batch)

        return step

    batch = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1)).double()
    traced = Traced(build, Memory(), batch)
    assert fuse_attention(prepared(traced.text))
    traced.check([batch], [(1, 1), (2, 1), (3, 2)])
