"""Weighs a loss by 1e-6 in float16, without a scale that keeps its gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, features):
        hidden = F.relu(self.first(features))  # fault
        return self.last(hidden)


torch.manual_seed(0)
cstorch.amp.set_half_dtype("float16")
cstorch.amp.enable_mixed_precision()
backend = cstorch.backend("CSX")
with backend.device:
    model = Small()
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.Adam(model.parameters(), lr=0.01, eps=1e-12)


def input_fn():
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    return DataLoader(dataset, batch_size=16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = 1e-7 * F.cross_entropy(compiled(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=4)
for batch in executor:
    training_step(batch)
