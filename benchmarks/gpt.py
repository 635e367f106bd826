"""A GPT of any size: small ones that are run, and large ones that are only compiled."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSettings:
    """Its size."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    sequence: int


class _Block(nn.Module):
    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        parts = self.attention(self.before_attention(x)).split(width, dim=2)
        q, k, v = (part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.before_network(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, settings: GPTSettings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(settings.vocabulary, settings.width)
        self.positions = nn.Embedding(settings.sequence, settings.width)
        self.h = nn.ModuleList([_Block(settings) for _ in range(settings.layers)])
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, settings.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of the next tokens, in no less than float32."""
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))
