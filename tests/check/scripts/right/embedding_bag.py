"""A recommender: embeddings of users and items, with masked ratings."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(30, 8, padding_idx=0)
        self.biases = nn.Embedding(30, 1)

    def forward(self, users, items):
        ratings = (self.users(users).unsqueeze(1) * self.items(items)).sum(-1)
        return ratings + self.biases(items).squeeze(-1)


torch.manual_seed(13)
backend = cstorch.backend("CSX")
with backend.device:
    model = Recommender()
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.Adam(model.parameters(), lr=0.01)


def input_fn():
    users, items = torch.randint(20, (64,)), torch.randint(30, (64, 5))
    return DataLoader(TensorDataset(users, items, torch.rand(64, 5)), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    users, items, ratings = batch
    mask = (items != 0).float()
    squares = (compiled(users, items) - ratings) ** 2
    loss = (squares * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=5):
    training_step(batch)
