"""A small convolutional network with batch norm, of bytes that the step makes float32.

The gradients of the biases before batch norms are zero but for rounding, which float64 has to tell.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(1)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.01)


def input_fn():
    return DataLoader(
        TensorDataset(torch.randint(256, (32, 1, 8, 8), dtype=torch.uint8), torch.randint(4, (32,))), 16, drop_last=True
    )


@cstorch.trace
def training_step(batch):
    images, labels = batch
    loss = F.cross_entropy(compiled(images.float() / 255), labels)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=6):
    training_step(batch)
