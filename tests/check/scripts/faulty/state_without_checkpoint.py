"""Reads weights in a step closure, and changes them between executions, without checkpoint steps."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(0)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)


def input_fn():
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    return DataLoader(dataset, batch_size=16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@cstorch.step_closure
def log(loss):
    print(loss.item(), model[0].weight.norm())  # fault


loader = cstorch.utils.data.DataLoader(input_fn)
for batch in cstorch.utils.data.DataExecutor(loader, num_steps=4):
    log(training_step(batch))
with torch.no_grad():
    model[0].weight.mul_(0.5)
for batch in cstorch.utils.data.DataExecutor(loader, num_steps=4):  # fault
    training_step(batch)
