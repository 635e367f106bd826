"""Keeps a whole matrix of scores for a sequence that is too long for a wafer."""

import torch
import torch.nn.functional as F
from torch import nn

import cerebras.pytorch as cstorch


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, tokens):
        hidden = self.inner(tokens)
        scores = torch.tanh(hidden @ hidden.transpose(1, 2))  # fault
        return (scores @ hidden).mean(1)


torch.manual_seed(0)
backend = cstorch.backend("CSX")
with backend.device:
    model = Attention()
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)


def input_fn():
    return [(torch.zeros(1, 1 << 18, 8), torch.zeros(1, dtype=torch.int64))]


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
