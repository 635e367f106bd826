"""Parts of text models and their losses: on simulated clusters they give what plain torch gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Traced
from test_compiler_parity import train
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.parity

TOKENS, WIDTH, CLASSES = 6, 8, 7
CLUSTERS = [(1, 1), (2, 1), (3, 2)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, CLASSES)
        self.weights = nn.Parameter(torch.randn(CLASSES))
        self.heads, self.slopes = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.rand(2))
        self.norm = nn.RMSNorm(WIDTH)

    def qkv(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.heads(x).chunk(3, -1))


def batch() -> Any:
    labels = torch.randint(0, CLASSES, (BATCH, TOKENS))
    labels[torch.rand(BATCH, TOKENS) < 0.3] = -100
    places = torch.randint(-TOKENS, TOKENS, (BATCH,))
    return (
        torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64),
        labels,
        places,
        torch.rand(BATCH, TOKENS, dtype=torch.float64),
    )


def check(loss: Callable[[Any, Any], torch.Tensor], model: nn.Module) -> None:
    batches = [batch() for _ in range(2)]
    Traced(train(loss), model, batches[0]).check(batches, CLUSTERS)


def tokens_loss(model: Any, given: Any, **settings: Any) -> torch.Tensor:
    return F.cross_entropy(model.out(given[0]).flatten(0, 1), given[1].flatten(), **settings)


def per_token(model: Any, given: Any) -> torch.Tensor:
    return tokens_loss(model, given, reduction="none").view(BATCH, TOKENS)


def each(given: Any) -> torch.Tensor:
    return torch.arange(BATCH, device=given[0].device)


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "sum": lambda m, b: tokens_loss(m, b, reduction="sum"),
    "mean": lambda m, b: tokens_loss(m, b),
    "smoothed": lambda m, b: tokens_loss(m, b, label_smoothing=0.1),
    "class-weights": lambda m, b: tokens_loss(m, b, weight=m.weights.detach().exp()),
    "smoothed-class-weights": lambda m, b: tokens_loss(m, b, weight=m.weights.detach().exp(), label_smoothing=0.2),
    "token-weights": lambda m, b: (per_token(m, b) * b[3]).sum() / b[3].sum(),
    "sample-weights": lambda m, b: (per_token(m, b).mean(1) * b[3][:, 0]).mean(),
    "perplexity": lambda m, b: tokens_loss(m, b).exp(),
    "perplexity-of-samples": lambda m, b: per_token(m, b).mean(1).exp().mean(),
    "classes-second": lambda m, b: F.cross_entropy(m.out(b[0]).transpose(1, 2), b[1]),
    "classes-second-smoothed": lambda m, b: F.cross_entropy(m.out(b[0]).transpose(1, 2), b[1], label_smoothing=0.1),
    "classes-second-weights": lambda m, b: F.cross_entropy(m.out(b[0]).transpose(1, 2), b[1], m.weights.detach().exp()),
    "classes-second-none": lambda m, b: (
        F.cross_entropy(m.out(b[0]).transpose(1, 2), b[1], reduction="none") * b[3]
    ).mean(),
    "log-sigmoid": lambda m, b: -F.logsigmoid(m.out(b[0])).mean(),
    "row-of-each": lambda m, b: m.out(b[0])[each(b), b[2]].pow(2).mean(),
    "rows-of-each": lambda m, b: m.out(b[0])[each(b)[:, None], b[1].clamp(0, TOKENS - 1)].pow(2).mean(),
    "last-of-each": lambda m, b: m.out(b[0])[each(b), (b[1] >= 0).sum(1) - 1].exp().mean(),
    "own-logit": lambda m, b: m.out(b[0])[:, 0][each(b), b[2] % CLASSES].pow(2).sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses(loss: Callable[[Any, Any], torch.Tensor]) -> None:
    check(loss, Parts())


def causal(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()


def alibi(model: Any, x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(TOKENS, device=x.device)
    return model.slopes[:, None, None] * (places[None, :] - places[:, None]).to(x.dtype)


def attended(model: Any, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*model.qkv(model.norm(x)), **settings).pow(2).mean()


def masked(model: Any, x: torch.Tensor, heads: int, features: int) -> torch.Tensor:
    """Heads of keys and values that queries share, and values of fewer features."""
    query, key, value = model.qkv(model.norm(x))
    value = value[:, :heads, :, :features]
    return F.scaled_dot_product_attention(query, key[:, :heads], value, attn_mask=causal(x)).pow(2).mean()


def one_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).mean()


ATTENTION: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "all": lambda m, b: attended(m, b[0]),
    "causal": lambda m, b: attended(m, b[0], is_causal=True),
    "scaled": lambda m, b: attended(m, b[0], scale=0.7),
    "truth-mask": lambda m, b: attended(m, b[0], attn_mask=causal(b[0])),
    "mask-of-samples": lambda m, b: attended(m, b[0], attn_mask=(b[3] < 0.7)[:, None, None, :]),
    "added-mask": lambda m, b: attended(m, b[0], attn_mask=b[3][:, None, :, None] * b[3][:, None, None, :]),
    "fixed-bias": lambda m, b: attended(m, b[0], attn_mask=alibi(m, b[0]).detach()[None]),
    "learned-bias": lambda m, b: attended(m, b[0], attn_mask=alibi(m, b[0])),
    "learned-bias-and-mask": lambda m, b: attended(
        m, b[0], attn_mask=alibi(m, b[0]).masked_fill(~causal(b[0]), -torch.inf)
    ),
    "hidden-rows": lambda m, b: attended(m, b[0], attn_mask=causal(b[0]) & (b[3] < 0.5)[:, None, :, None]),
    "hidden-rows-with-bias": lambda m, b: attended(
        m, b[0], attn_mask=alibi(m, b[0])[None].masked_fill((b[3] < 0.5)[:, None, :, None], -torch.inf)
    ),
    "shared-heads-and-truth-mask": lambda m, b: masked(m, b[0], 1, 4),
    "narrow-values-and-truth-mask": lambda m, b: masked(m, b[0], 2, 3),
    "one-head": lambda m, b: one_head(*m.heads(b[0]).chunk(3, -1)),
}


@pytest.mark.parametrize("loss", ATTENTION.values(), ids=ATTENTION)
def test_attention(loss: Callable[[Any, Any], torch.Tensor]) -> None:
    check(loss, Parts())


def with_mask(model: Any, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    hidden = ~causal(x)
    out, weights = model(x, x, x, attn_mask=hidden, **settings)
    return out.pow(2).mean() + (0 if weights is None else weights.pow(2).mean())


MULTIHEAD: dict[str, tuple[bool, Callable[[Any, Any], torch.Tensor]]] = {
    "batch-first": (True, lambda m, b: with_mask(m, b[0], need_weights=False)),
    "sequence-first": (False, lambda m, b: with_mask(m, b[0].transpose(0, 1), need_weights=False)),
    "weights": (True, lambda m, b: with_mask(m, b[0])),
    "weights-sequence-first": (False, lambda m, b: with_mask(m, b[0].transpose(0, 1))),
    "padding": (
        True,
        lambda m, b: m(b[0], b[0], b[0], key_padding_mask=b[3] < 0.3, need_weights=False)[0].pow(2).mean(),
    ),
    "across": (True, lambda m, b: m(b[0][:, :2], b[0], b[0].tanh(), need_weights=False)[0].pow(2).mean()),
}


@pytest.mark.parametrize("case", MULTIHEAD.values(), ids=MULTIHEAD)
def test_multihead_attention(case: tuple[bool, Callable[[Any, Any], torch.Tensor]]) -> None:
    batch_first, loss = case
    check(loss, nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layers(batch_first: bool, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0] if batch_first else b[0].transpose(0, 1)
        return m(x, mask=~causal(x), is_causal=norm_first).pow(2).mean()

    check(loss, model)


def test_attention_is_one_operation_in_each_direction() -> None:
    traced = Traced(train(ATTENTION["causal"]), Parts(), batch())
    assert traced.text.count("cirh.Attention ") == 1
    assert traced.text.count("cirh.AttentionGrad ") == 1
    assert "Softmax" not in traced.text


def test_a_bias_that_is_learned_takes_attention_apart() -> None:
    traced = Traced(train(ATTENTION["learned-bias"]), Parts(), batch())
    assert "cirh.Attention" not in traced.text
    assert "cirh.Softmax" in traced.text
