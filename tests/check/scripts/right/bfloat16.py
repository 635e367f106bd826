"""Mixed precision with bfloat16, with autocast for the CPU, and a loader that yields half precision."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(5)
cstorch.amp.set_half_dtype("bfloat16")
cstorch.amp.enable_mixed_precision()
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.003)


def input_fn():
    return DataLoader(TensorDataset(torch.randn(64, 16).bfloat16(), torch.randint(4, (64,))), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    with cstorch.amp.autocast():
        loss = F.cross_entropy(compiled(features).float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=6):
    training_step(batch)
