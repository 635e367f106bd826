"""A recurrent network that sums numbers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


class Summing(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(2, 8, batch_first=True)
        self.last = nn.Linear(8, 1)

    def forward(self, numbers):
        outputs, _ = self.recurrent(numbers)
        return self.last(outputs[:, -1])


torch.manual_seed(4)
backend = cstorch.backend("CSX")
with backend.device:
    model = Summing()
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.RMSprop(model.parameters(), lr=0.01)


def input_fn():
    numbers = torch.rand(64, 5, 2)
    return DataLoader(TensorDataset(numbers, numbers.sum((1, 2)).unsqueeze(1)), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    numbers, sums = batch
    loss = F.mse_loss(compiled(numbers), sums)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=5):
    training_step(batch)
