"""Has 15 rows in a batch, which two wafers cannot share."""

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
    dataset = TensorDataset(torch.randn(60, 8), torch.randint(4, (60,)))
    return DataLoader(dataset, batch_size=15, drop_last=True)  # fault


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
