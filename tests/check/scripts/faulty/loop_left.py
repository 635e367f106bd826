"""Leaves its loop when the loss is small, before the last step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(0)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Linear(8, 4)
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


losses = []


@cstorch.step_closure
def note(loss):
    losses.append(loss.item())


executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=4)
for batch in executor:
    note(training_step(batch))
    if losses and losses[-1] < 10.0:
        break  # fault
torch.save(model.state_dict(), "model.pt")
