"""Two groups of parameters: weights, which decay, and biases and norms, which do not."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(12)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.Lamb(
    [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.001},
    ],
    lr=0.01,
)


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


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=5):
    training_step(batch)
