"""Small text models, written as users write them, each with its loss and its batches."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from compiled_steps import BATCH
from torch import nn
from torch.nn import functional as F

VOCABULARY, TOKENS, WIDTH, HEADS = 23, 8, 16, 4
IGNORED = -100


@dataclass(frozen=True)
class TextModel:
    """`loss(model, batch)` gives the loss and the logits that it is made of; `labels(batch)` their labels."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]]
    batch: Callable[[], Any]
    labels: Callable[[Any], torch.Tensor] = itemgetter(1)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape or (BATCH, TOKENS))


def labels(ignored: float = 0.3) -> torch.Tensor:
    return torch.where(torch.rand(BATCH, TOKENS) < ignored, IGNORED, tokens())


def language_loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), wanted.reshape(-1), ignore_index=IGNORED)


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


# -- GPT-2: learned positions, layer norm first, causal attention, tied weights


class GptBlock(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (heads(t, self.count) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        x = x + self.c_proj(joined(F.scaled_dot_product_attention(query, key, value, is_causal=True)))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(
        self,
        vocabulary: int = VOCABULARY,
        width: int = WIDTH,
        layers: int = 2,
        count: int = HEADS,
        positions: int = TOKENS,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(GptBlock(width, count) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits


def gpt2_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch[0])
    return language_loss(logits, batch[1]), logits


# -- BERT: token types, padding mask, masked language model and next sentence


class Bert(nn.Module):
    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.positions, self.types = (nn.Embedding(n, WIDTH) for n in (VOCABULARY, TOKENS, 2))
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout, F.gelu, batch_first=True)
            for _ in range(layers)
        )
        self.register_buffer("position_ids", torch.arange(TOKENS)[None])
        self.pooler, self.next = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.transform, self.transform_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: torch.Tensor, kinds: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.words(ids) + self.positions(self.position_ids) + self.types(kinds))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=kept == 0)
        pooled = self.next(torch.tanh(self.pooler(x[:, 0])))
        x = self.transform_norm(F.gelu(self.transform(x)))
        return F.linear(x, self.words.weight, self.bias), pooled


def bert_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, kinds, kept, wanted, follows = batch
    logits, pooled = model(ids, kinds, kept)
    return language_loss(logits, wanted) + F.cross_entropy(pooled, follows), logits


def bert_batch() -> Any:
    lengths = torch.randint(3, TOKENS + 1, (BATCH, 1))
    kept = (torch.arange(TOKENS)[None] < lengths).long()
    return tokens(), torch.randint(0, 2, (BATCH, TOKENS)), kept, labels(0.8), torch.randint(0, 2, (BATCH,))


# -- T5: encoder and decoder, a learned bias for buckets of distances, RMS norm, no scale


class RmsNorm(nn.Module):
    """The norm as Llama and T5 write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class RelativeBias(nn.Module):
    def __init__(self, both_ways: bool) -> None:
        super().__init__()
        self.both_ways, self.buckets, self.furthest = both_ways, 8, 16
        self.table = nn.Embedding(self.buckets, HEADS)

    def bucket(self, distance: torch.Tensor) -> torch.Tensor:
        count, result = self.buckets, torch.zeros_like(distance)
        if self.both_ways:
            count //= 2
            result = result + (distance > 0).long() * count
            distance = distance.abs()
        else:
            distance = -torch.min(distance, torch.zeros_like(distance))
        near = count // 2
        far = torch.log(distance.float() / near) / math.log(self.furthest / near) * (count - near)
        far = torch.min(near + far.long(), torch.full_like(distance, count - 1))
        return result + torch.where(distance < near, distance, far)

    def forward(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        context, memory = torch.arange(queries, device=device), torch.arange(keys, device=device)
        values: torch.Tensor = self.table(self.bucket(memory[None, :] - context[:, None]))
        return values.permute(2, 0, 1).unsqueeze(0)


class T5Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        query, key, value = heads(self.q(x), HEADS), heads(self.k(memory), HEADS), heads(self.v(memory), HEADS)
        return self.o(joined(F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)))


class T5Block(nn.Module):
    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RmsNorm(WIDTH) for _ in range(3 if decoder else 2))
        self.own, self.across = T5Attention(), T5Attention() if decoder else None
        self.wi_0, self.wi_1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.wo = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.norms[0](x)
        x = x + self.own(normed, normed, bias)
        if self.across is not None:
            assert memory is not None
            x = x + self.across(self.norms[1](x), memory, None)
        normed = self.norms[-1](x)
        return x + self.wo(F.gelu(self.wi_0(normed), approximate="tanh") * self.wi_1(normed))


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = nn.ModuleList([T5Block(False)]), nn.ModuleList([T5Block(True)])
        self.encoder_bias, self.decoder_bias = RelativeBias(True), RelativeBias(False)
        self.encoder_norm, self.decoder_norm = RmsNorm(WIDTH), RmsNorm(WIDTH)

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x, bias = self.shared(ids), self.encoder_bias(TOKENS, TOKENS, ids.device)
        for block in self.encoder:
            x = block(x, bias)
        memory = self.encoder_norm(x)
        # The decoder reads what it is to write, one place later, behind a start token.
        before = wanted.new_zeros(wanted.shape)
        before[:, 1:] = wanted[:, :-1]
        x = self.shared(before.masked_fill(before == IGNORED, 0))
        causal = torch.full((TOKENS, TOKENS), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        bias = self.decoder_bias(TOKENS, TOKENS, ids.device) + causal
        for block in self.decoder:
            x = block(x, bias, memory)
        return F.linear(self.decoder_norm(x) * WIDTH**-0.5, self.shared.weight)


def t5_loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(*batch)
    return language_loss(logits, batch[1]), logits


# -- Llama: rotary positions, key heads that query heads share, gated linear units


def rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotation of neighbouring features, without complex numbers."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class LlamaBlock(nn.Module):
    def __init__(self, shared: int, neighbours: bool, built_in: bool) -> None:
        super().__init__()
        self.neighbours, self.built_in, self.shared = neighbours, built_in, shared
        size = WIDTH // HEADS
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, shared * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        norm = nn.RMSNorm if built_in else RmsNorm
        self.norm_1, self.norm_2 = norm(WIDTH), norm(WIDTH)

    def rotary(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        if self.neighbours:
            return interleaved(x, angles.cos(), angles.sin())
        both = torch.cat([angles, angles], -1)
        return x * both.cos() + rotated(x) * both.sin()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        normed = self.norm_1(x)
        query = self.rotary(heads(self.q_proj(normed), HEADS), angles)
        key = self.rotary(heads(self.k_proj(normed), self.shared), angles)
        value = heads(self.v_proj(normed), self.shared)
        if not self.built_in:
            key, value = (t.repeat_interleave(HEADS // self.shared, 1) for t in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.built_in)
        x = x + self.o_proj(joined(attended))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    frequencies: torch.Tensor

    def __init__(self, neighbours: bool = False, built_in: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock(2, neighbours, built_in) for _ in range(2))
        self.norm, self.lm_head = RmsNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        self.register_buffer("frequencies", 10000 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        places = torch.arange(ids.shape[1], device=ids.device)
        angles = places[:, None].to(self.frequencies.dtype) * self.frequencies[None, :]
        for layer in self.layers:
            x = layer(x, angles)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


def next_tokens() -> Any:
    return tokens(), labels()


MODELS = {
    "gpt2": TextModel(Gpt2, gpt2_loss, next_tokens),
    "bert": TextModel(Bert, bert_loss, bert_batch, itemgetter(3)),
    "t5": TextModel(T5, t5_loss, next_tokens),
    "llama": TextModel(Llama, gpt2_loss, next_tokens),
    "llama-built-in": TextModel(lambda: Llama(neighbours=True, built_in=True), gpt2_loss, next_tokens),
}
