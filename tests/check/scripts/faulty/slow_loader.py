"""Reads samples far slower than a wafer takes them."""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import cerebras.pytorch as cstorch

torch.manual_seed(0)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.03)  # fault
        return torch.full((8,), index / 64), index % 4


def input_fn():
    return DataLoader(Slow(), batch_size=16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=3)
for batch in executor:
    training_step(batch)
