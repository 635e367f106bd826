"""Metrics of a training and of an evaluation with a last batch of the same size."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(9)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.Adagrad(model.parameters(), lr=0.05)
accuracy = cstorch.metrics.AccuracyMetric("accuracy")


def input_fn(rows, batch_size):
    features = torch.randn(rows, 8)
    return DataLoader(TensorDataset(features, (features.sum(1) > 0).long()), batch_size, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@cstorch.trace
def eval_step(batch):
    features, labels = batch
    logits = compiled(features)
    accuracy(labels=labels, predictions=logits.argmax(-1))
    return F.cross_entropy(logits, labels)


for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn, 64, 16), num_steps=5):
    training_step(batch)
model.eval()
with torch.no_grad():
    for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn, 32, 8)):
        eval_step(batch)
print(float(accuracy))
