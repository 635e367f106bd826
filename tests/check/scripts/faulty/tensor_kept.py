"""Keeps an average that the step creates, to be used by the next step."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.mean = None

    def forward(self, features):
        mean = features.mean(0)
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean  # fault
        return self.inner(features - self.mean)


torch.manual_seed(0)
backend = cstorch.backend("CSX")
with backend.device:
    model = Centered()
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


executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=4)
for batch in executor:
    training_step(batch)
