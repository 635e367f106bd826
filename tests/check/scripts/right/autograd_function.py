"""A function with a gradient of its own: rounding that lets gradients through."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Quantized(nn.Linear):
    def forward(self, features):
        return F.linear(features, Rounded.apply(self.weight), self.bias)


torch.manual_seed(11)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(Quantized(8, 16), nn.SiLU(), Quantized(16, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def input_fn():
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=5):
    training_step(batch)
