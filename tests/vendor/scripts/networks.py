"""Small networks, each with its initial weights, which do not depend on torch's version."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, TOKENS, WIDTH = 32, 8, 16


class Images(nn.Module):
    """Convolutions with batch norm over images of one channel, 8 x 8."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.last_norm = nn.Conv2d(8, 8, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(8)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8 * 2 * 2, 4)

    def forward(self, x):
        x = self.pool(F.relu(self.norm(self.first(x))))
        return self.head(F.relu(self.last_norm(self.second(x))).flatten(1))


class Block(nn.Module):
    """A layer of the language model, with two heads."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        parts = self.heads(self.before(x)).split(WIDTH, dim=2)
        query, key, value = (part.view(*x.shape[:2], 2, WIDTH // 2).transpose(1, 2) for part in parts)
        weights = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(WIDTH / 2) + mask, dim=-1)
        x = x + self.joined((weights @ value).transpose(1, 2).reshape(x.shape))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Text(nn.Module):
    """A language model of two layers, whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (places[None, :] > places[:, None]).to(torch.float32) * -10000.0
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def make(name):
    """A network, by the name of what it is for."""
    if name == "vectors":
        network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    else:
        network = Images() if name == "images" else Text()
    draws = np.random.RandomState(1)
    with torch.no_grad():
        for kind, parameter in network.named_parameters():
            values = draws.normal(0, 0.2, parameter.shape).astype("f")
            parameter.copy_(torch.from_numpy(values + ("norm" in kind and kind.endswith("weight"))))
    return network
