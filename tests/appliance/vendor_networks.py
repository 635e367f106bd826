"""The networks whose steps `tests/shared/vendor_texts` has, in plain torch."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


class Part(nn.Module):
    """A linear layer, and an operation on what it makes of 16 rows of 8."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive_pool": lambda x: F.adaptive_avg_pool2d(x.reshape(16, 1, 1, 8), (1, 3)) * x[:, None, None, :3],
    "cumsum": lambda x: x.cumsum(-1),
    "elu": F.elu,
    "gather": lambda x: x.gather(1, (x > 0).long()),
    "gather_along": lambda x: x.gather(1, (x[:, :3] > 0).long()),
    "group_norm": lambda x: F.group_norm(x.reshape(16, 4, 2, 1), 2, eps=0.1).flatten(1) * x,
    "leaky_relu": F.leaky_relu,
    "max_pool": lambda x: F.max_pool2d(x.reshape(16, 1, 2, 4), 2),
    "max": lambda x: x.max(-1)[0],
    "pad": lambda x: F.pad(x, (1, 2)),
    "sdpa": lambda x: F.scaled_dot_product_attention(*(x.reshape(16, 1, 2, 4),) * 3),
    "sigmoid": torch.sigmoid,
    "slice": lambda x: x[:, 1:5],
    "slice_step": lambda x: x[:, ::2],
    "topk": lambda x: x.topk(3, -1)[0],
}


class Images(nn.Module):
    """Two convolutions with batch norm and pooling."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.c2, self.n2 = nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.pool, self.out = pool, nn.Linear(8 * 2 * 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.n1(self.c1(x))))
        return self.out(F.relu(self.n2(self.c2(x))).flatten(1))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).split(c, dim=2))
        weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + mask, dim=-1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.f2(F.gelu(self.f1(self.n2(x))))


class Text(nn.Module):
    """A transformer of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(_Block(16, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        mask = (places[None, :] > places[:, None]).float() * -10000.0
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=1e-6)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer]]] = {
    "cnn_bn": (lambda: Images(nn.MaxPool2d(2)), sgd),
    "cnn_avg_bn": (lambda: Images(nn.AvgPool2d(2)), adamw),
    "gpt": (Text, adamw),
}
