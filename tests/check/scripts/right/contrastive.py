"""A contrastive loss over the samples of a batch, on one wafer."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(14)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.01)


def input_fn():
    views = torch.randn(64, 8)
    return DataLoader(TensorDataset(views, views + 0.1 * torch.randn(64, 8)), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    first, second = (F.normalize(compiled(view), dim=-1) for view in batch)
    similarity = first @ second.T / 0.1
    own = torch.arange(similarity.shape[0], device=similarity.device)
    loss = (F.cross_entropy(similarity, own) + F.cross_entropy(similarity.T, own)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=5):
    training_step(batch)
