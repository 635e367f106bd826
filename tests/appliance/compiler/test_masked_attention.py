"""Attention with masks as decoders and encoders write them out: always fused, forward and backward, and right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Traced, loss_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.target import Target
from appliance.compiler.passes.canonicalise import canonicalise
from appliance.compiler.passes.cse import join_common_subexpressions
from appliance.compiler.passes.fold import fold_constants
from appliance.compiler.passes.fuse_attention import fuse_attention
from appliance.compiler.passes.known_masks import Diagonals, KnownMasks, KnownValues, Mask
from appliance.compiler.passes.sink_broadcasts import sink_broadcasts
from appliance.compiler.pipeline import Stages
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.parser import parse_module

pytestmark = pytest.mark.parity

LAYERS, HEADS, TOKENS, WIDTH, WINDOW = 2, 2, 6, 8, 3
Masking = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def distance(scores: torch.Tensor) -> torch.Tensor:
    """How far each key lies before its query, in the shape of the scores."""
    places = torch.arange(TOKENS, device=scores.device, dtype=scores.dtype)
    return places.view(TOKENS, 1).expand(scores.shape) - places.view(1, TOKENS).expand(scores.shape)


def causal(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    later = -distance(scores) > 0
    return scores + torch.where(later, torch.full_like(scores, -torch.inf), torch.zeros_like(scores))


def causal_by_fill(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    shown = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~shown, torch.finfo(scores.dtype).min)


def causal_by_number(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    shown = torch.ones(1, 1, TOKENS, TOKENS, dtype=scores.dtype, device=scores.device).tril()
    return scores + (1 - shown) * torch.finfo(scores.dtype).min


def sliding(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    before = distance(scores)
    hidden = (before < 0) | (before >= WINDOW)
    return scores + torch.zeros_like(scores).masked_fill(hidden, torch.finfo(scores.dtype).min)


def documents(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Two documents follow each other in each row."""
    places = torch.arange(TOKENS, device=scores.device)
    document = (places[None] >= lengths[:, None]).to(scores.dtype)
    other = document[:, None, :, None] != document[:, None, None, :]
    later = places[None, :] > places[:, None]
    hidden = (other | later[None, None]).expand(scores.shape)
    return scores + torch.where(hidden, torch.full_like(scores, -torch.inf), torch.zeros_like(scores))


def padding(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    shown = (torch.arange(TOKENS, device=scores.device)[None] < lengths[:, None]).to(scores.dtype)
    return scores + ((1 - shown) * torch.finfo(scores.dtype).min)[:, None, None, :]


def causal_and_padding(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return padding(causal(scores, lengths), lengths)


MASKS: dict[str, tuple[Masking, bool]] = {
    "causal": (causal, True),
    "causal by fill": (causal_by_fill, True),
    "causal by number": (causal_by_number, True),
    "sliding": (sliding, False),
    "documents": (documents, False),
    "padding": (padding, False),
    "causal and padding": (causal_and_padding, False),
}


class Layer(nn.Module):
    """Attention, written out; the query is scaled, or the scores are."""

    def __init__(self, mask: Masking, by_query: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mask, self.by_query = mask, by_query

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        query, key, value = (self.heads(part(x)) for part in (self.query, self.key, self.value))
        if self.by_query:
            scores = torch.matmul(query * 0.5, key.transpose(-1, -2))
        else:
            scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / 2.0
        weights = torch.softmax(self.mask(scores, lengths), dim=-1)
        return x + self.out((weights @ value).transpose(1, 2).reshape(x.shape))


class Network(nn.Module):
    def __init__(self, mask: Masking, by_query: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(mask, by_query) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, lengths)
        return x


def training(model: Any) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        return loss_and_gradients(model, model(*batch).square().mean())

    return step


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator).double()
    return x, torch.randint(1, TOKENS, (BATCH,), generator=generator)


def fused(text: str) -> ModuleOp:
    module = parse_module(text)
    for run in (canonicalise, fold_constants, sink_broadcasts, join_common_subexpressions, fuse_attention):
        run(module)
    return module


@pytest.mark.parametrize("by_query", [True, False])
@pytest.mark.parametrize("name", MASKS)
def test_every_attention_is_fused(name: str, by_query: bool) -> None:
    mask, is_causal = MASKS[name]
    torch.manual_seed(3)
    traced = Traced(training, Network(mask, by_query), batch(1))
    module = fused(traced.text)
    found = [op for op in body_ops(module) if op.name in ("cirh.Attention", "cirh.AttentionGrad")]
    assert [op.name for op in found] == ["cirh.Attention"] * LAYERS + ["cirh.AttentionGrad"] * LAYERS
    assert all(attrs(op)["is_causal"] is is_causal for op in found)
    of_scores = (BATCH, HEADS, TOKENS, TOKENS)
    assert of_scores not in {types.shape(result) for op in found for result in op.operands}
    traced.check([batch(1), batch(2)], [(1, 1), (2, 1), (3, 2)])


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float64).min, -1e20, -1e9])
def test_queries_whose_keys_are_all_hidden_by_numbers_have_the_gradients_of_softmax(hidden: float) -> None:
    """As the first queries of rows that are padded on the left: all their weights are equal."""

    def padding_on_the_left(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        places = torch.arange(TOKENS, device=scores.device)
        shown = (places[None, None] >= lengths[:, None, None]) & (places[None, None] <= places[None, :, None])
        added = torch.zeros(shown.shape, dtype=scores.dtype, device=scores.device).masked_fill(~shown, hidden)
        return scores + added[:, None]

    torch.manual_seed(3)
    traced = Traced(training, Network(padding_on_the_left, by_query=False), batch(1))
    names = [op.name for op in body_ops(fused(traced.text))]
    assert names.count("cirh.AttentionGrad") == LAYERS
    traced.check([batch(1), batch(2)], [(1, 1), (2, 1), (3, 2)])


@settings(max_examples=60, database=None, derandomize=True)
@given(
    queries=st.integers(2, 6),
    keys=st.integers(2, 6),
    step=st.sampled_from([1, 2, -3]),
    start=st.integers(-3, 3),
    bound=st.integers(-6, 6),
    sign=st.sampled_from(["GT", "LE", "EQ"]),
    swapped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.int64]),
    directly=st.booleans(),
)
def test_masks_of_distances_are_known_by_distance(
    queries: int,
    keys: int,
    step: int,
    start: int,
    bound: int,
    sign: str,
    swapped: bool,
    dtype: torch.dtype,
    directly: bool,
) -> None:
    graph, shape = GraphBuilder(), (queries, keys)

    def spread(numbers: torch.Tensor, dim: int) -> SSAValue:
        kind = types.tensor_type(shape, dtype)
        source = graph.dense(numbers.to(dtype))
        return graph.op("cirh.BroadcastInDim", [source], {"broadcast_dimensions": [dim]}, types=[kind])[0]

    rows = spread(start + step * torch.arange(queries), 0)
    columns = spread(step * torch.arange(keys) + (bound if directly else 0), 1)
    operands = [columns, rows] if swapped else [rows, columns]
    if not directly:
        operands = [*graph.op("cirh.Sub", operands), graph.splat(bound, shape, dtype)]
    (hidden,) = graph.op("cirh.Compare", operands, {"comparison_direction": sign})
    module = graph.finish([(hidden, None)])
    (expected,) = Kernel.build(module)([])
    diagonals = Diagonals(KnownValues()).get(hidden)
    assert diagonals is not None
    distances = torch.arange(queries)[:, None] - torch.arange(keys)[None]
    assert torch.equal(diagonals[distances + keys - 1], expected)
    assert isinstance(hidden.owner, Operation)
    effect = KnownMasks().effect(Mask(hidden, hidden.owner, -torch.inf))
    assert effect is not None
    assert effect.hides_rows is bool(expected.all(-1).any())
    later = torch.ones(shape, dtype=torch.bool).triu(1)
    assert effect.is_causal is (queries == keys and torch.equal(expected, later))


def test_a_mask_that_no_sample_changes_is_made_where_it_is_used() -> None:
    """It is not streamed, however many tokens there are."""
    size = 80  # squared, more than what the wafers compute of other small values

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, scores: torch.Tensor) -> torch.Tensor:
            places = torch.arange(size, device=scores.device)
            far = (places[:, None] - places[None]).abs() > WINDOW
            added = torch.zeros(size, size, dtype=scores.dtype, device=scores.device).masked_fill(far, -1e9)
            return (scores * self.scale + added).softmax(-1)

    def step_of(model: Any) -> Callable[[Any], Any]:
        def step(scores: Any) -> Any:
            with torch.no_grad():
                return model(scores).sum((1, 2))

        return step

    scores = torch.randn(BATCH, size, size, generator=torch.Generator().manual_seed(1)).double()
    traced = Traced(step_of, Masked(), scores)
    cut = Stages(fused(traced.text), Target(num_csx=2, num_shards=1)).cut
    assert [types.shape(value) for value in cut.streamed] == [()]
    traced.check([scores], [(1, 1), (2, 1), (3, 2)])
