"""Attention with dropout and with masks that are learned: fused in encoders and decoders, and right."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, RandomTraced, Traced, loss_and_gradients
from torch import nn
from torch.nn import functional as F

from appliance.compiler.cost.kernel_profile import temporary_bytes
from appliance.compiler.pipeline import CompiledStep
from waferbox.cirh.calls import attention_products
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.attributes import attrs
from waferbox.cirh.dialect.operations import body_ops

pytestmark = pytest.mark.parity

HEADS, TOKENS, OTHER_TOKENS, WIDTH = 2, 5, 4, 6


class Attention(nn.Module):
    """Attention of one sequence to another, or to itself, written out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)

    def forward(self, x: torch.Tensor, other: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(self.query(x)), self.heads(self.key(other)), self.heads(self.value(other))
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        for mask in masks:
            scores = scores + mask.expand(scores.shape)
        weights = self.dropout(scores.softmax(-1))
        return x + self.out((weights @ value).transpose(1, 2).reshape(x.shape))


class EncoderDecoder(nn.Module):
    """Two layers of encoder, one of decoder; positions as T5's: a learned number for each head and distance."""

    def __init__(self, *, dropout: float, positions: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Attention(dropout) for _ in range(2))
        self.decoder, self.cross = Attention(dropout), Attention(dropout)
        self.positions = nn.Embedding(2 * TOKENS, HEADS) if positions else None

    def learned(self, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.positions is None:
            return ()
        distances = places[None] - places[:, None] + TOKENS
        return (self.positions(distances).permute(2, 0, 1).unsqueeze(0),)

    def forward(self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        places = torch.arange(TOKENS, device=x.device)
        padding = (places >= lengths[:, None]).to(x.dtype) * torch.finfo(x.dtype).min
        padding = padding[:, None, None]
        for layer in self.encoder:
            x = layer(x, x, *self.learned(places), padding)
        later = torch.full((OTHER_TOKENS, OTHER_TOKENS), -math.inf, device=x.device, dtype=x.dtype).triu(1)
        y = self.decoder(y, y, later)
        return self.cross(y, x, padding)


def training(model: Any) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        return loss_and_gradients(model, model(*batch).square().mean())

    return step


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(BATCH, n, WIDTH, generator=generator).double() for n in (TOKENS, OTHER_TOKENS))
    return x, y, torch.randint(1, TOKENS, (BATCH,), generator=generator)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_attention_is_fused(dropout: float, positions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    traced = RandomTraced(training, EncoderDecoder(dropout=dropout, positions=positions), batch(1))
    ops = body_ops(CompiledStep(traced.text).module)
    found = [op for op in ops if "ttention" in op.name]
    assert [op.name for op in found] == ["cirh.Attention"] * 4 + ["cirh.AttentionGrad"] * 4
    assert not any("oftmax" in op.name for op in ops)
    assert sum("mask_grad" in attrs(op) for op in found) == 2 * positions
    scores = {
        (types.shape(value), types.dtype(value).is_floating_point)
        for op in ops
        for value in (*op.operands, *op.results)
    }
    assert ((BATCH, HEADS, TOKENS, TOKENS), True) not in scores
    for block_bytes in (attention_products.BLOCK_BYTES, 1, 4 * HEADS * TOKENS**2 * 8):
        monkeypatch.setattr(attention_products, "BLOCK_BYTES", block_bytes)
        traced.check([batch(1), batch(2)], [(1, 1), (2, 1), (3, 2)] if block_bytes > 1000 else [(1, 1)])


def test_dropout_in_torchs_function() -> None:
    """torch's own function is traced in parts, which are fused again."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.project(x).view(-1, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            query, key, value = parts.unbind(0)
            return F.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)

    torch.manual_seed(7)
    traced = RandomTraced(training, Own(), batch(1)[:1])
    module = CompiledStep(traced.text).module
    assert [op.name for op in body_ops(module) if "ttention" in op.name] == ["cirh.Attention", "cirh.AttentionGrad"]
    traced.check([batch(1)[:1]], [(1, 1), (2, 1)])


def test_temporary_memory_is_that_of_a_block() -> None:
    tokens = 600

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout((x * self.scale @ x.mT).softmax(-1), 0.5) @ x

    traced = Traced(training, Large(), (torch.zeros(BATCH, 8, tokens, 2),), double=False)
    (gradient,) = (op for op in body_ops(CompiledStep(traced.text).module) if op.name == "cirh.AttentionGrad")
    scores = BATCH * 8 * tokens**2 * 4
    assert temporary_bytes(gradient) < 4 * attention_products.BLOCK_BYTES < scores
