"""A multi-layer perceptron, trained by SGD with momentum."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(0)
backend = cstorch.backend("CSX", cluster_config=cstorch.distributed.ClusterConfig(num_csx=2))
with backend.device:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def input_fn(batch_size):
    dataset = TensorDataset(torch.randn(96, 8), torch.randint(4, (96,)))
    return DataLoader(dataset, batch_size, shuffle=True, drop_last=True)


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
def report(loss):
    losses.append(loss.item())


loader = cstorch.utils.data.DataLoader(input_fn, 32)
for batch in cstorch.utils.data.DataExecutor(loader, num_steps=10):
    report(training_step(batch))
print(losses)
