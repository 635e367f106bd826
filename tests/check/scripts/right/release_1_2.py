"""As scripts of release 1.2 are written: a plain loop of PyTorch inside a Session."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras_torch as cbtorch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.dropout, self.fc2 = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4)

    def forward(self, features):
        return self.fc2(self.dropout(F.relu(self.fc1(features))))


torch.manual_seed(20)
cbtorch.initialize(cs_ip="cluster", service_workdir="model_dir", num_csx=2)
model = cbtorch.module(Model())
criterion = nn.CrossEntropyLoss()
optimizer = cbtorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
dataset = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
loader = cbtorch.dataloader(DataLoader(dataset, batch_size=16, drop_last=True))


def report(step, loss):
    print(f"step {step}, loss {loss.item()}")


with cbtorch.Session(model, optimizer, criterion, mode="train") as session:
    for step, (features, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(features), labels)
        loss.backward()
        optimizer.step()
        session.add_step_closure(report, args=(step, loss))
