"""A GPT of one block, with tied weights and a causal mask."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 12, 16, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)), persistent=False)

    def forward(self, x):
        rows = x.shape[0]
        q, k, v = self.qkv(self.norm_1(x)).view(rows, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5
        attention = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        x = x + self.out((attention @ v).transpose(1, 2).reshape(rows, LENGTH, WIDTH))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH, device=tokens.device))
        return self.head(self.norm(self.block(x)))


torch.manual_seed(3)
backend = cstorch.backend("CSX")
with backend.device:
    model = GPT()
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.1)


def input_fn():
    return DataLoader(TensorDataset(torch.randint(VOCABULARY, (32, LENGTH + 1))), 8, drop_last=True)


@cstorch.trace
def training_step(batch):
    (tokens,) = batch
    logits = compiled(tokens[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=6):
    training_step(batch)
