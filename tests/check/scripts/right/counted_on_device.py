"""Counts its steps in a buffer, and warms up by it: the same program in every step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


class Warming(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0  # of Python's, which the step does not compute with

    def forward(self, features):
        self.calls += 1
        self.steps.add_(1)
        logits = self.inner(features)
        return torch.where(self.steps < 3, logits * self.steps / 3, logits)


torch.manual_seed(17)
backend = cstorch.backend("CSX")
with backend.device:
    model = Warming()
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)


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


for number, batch in enumerate(cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=6)):
    training_step(batch)
    progress = number / 6
