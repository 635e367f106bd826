"""Makes the part of one wafer, which is the same for each."""

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
    rows = cstorch.distributed.get_streaming_batch_size(16)
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    return DataLoader(dataset, batch_size=rows, drop_last=True)  # fault


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
