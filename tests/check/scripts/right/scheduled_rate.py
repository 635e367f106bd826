"""A learning rate that warms up and decays, and clipped gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(7)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.Adam(model.parameters(), lr=0.01)
scheduler = cstorch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        cstorch.optim.lr_scheduler.LinearLR(optimizer, 0.001, 0.01, 2),
        cstorch.optim.lr_scheduler.CosineDecayLR(optimizer, 0.01, 0.0, 10),
    ],
    milestones=[2],
)


def input_fn():
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    return loss, norm


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=12):
    training_step(batch)
