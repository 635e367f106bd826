"""Dropout in training, and none in the evaluation that follows."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(2)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 4), nn.Dropout(0.1))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.Adam(model.parameters(), lr=0.01)


def input_fn():
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@cstorch.trace
def eval_step(batch):
    features, labels = batch
    return F.cross_entropy(compiled(features), labels)


loader = cstorch.utils.data.DataLoader(input_fn)
for _ in range(2):
    model.train()
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=3):
        training_step(batch)
    model.eval()
    with torch.no_grad():
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=2):
            eval_step(batch)
