"""Squares large sums in float16, which ends at 65,504."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, features):
        hidden = self.first(features)
        return self.last(hidden * hidden) / 1e6  # fault


torch.manual_seed(0)
cstorch.amp.set_half_dtype("float16")
cstorch.amp.enable_mixed_precision()
backend = cstorch.backend("CSX")
with backend.device:
    model = Squared()
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)


def input_fn():
    dataset = TensorDataset(1000 * torch.randn(64, 8), torch.randint(4, (64,)))
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
