"""Trains on handwritten digits with the API of release 1.2: a plain loop of PyTorch inside a Session.

waferbox run --wafers 2 examples/session_digits/train.py --cs-ip cluster
"""

import argparse
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import cerebras_torch as cbtorch


def get_train_dataloader() -> DataLoader:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    return DataLoader(dataset, batch_size=128, shuffle=True, drop_last=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(images)))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cs-ip", help="the cluster; without it everything runs on the CPU")
parser.add_argument("--num-csx", type=int, default=2)
parser.add_argument("--num-epochs", type=int, default=3)
parser.add_argument("--model-dir", type=Path, default=Path("model_dir"))
args = parser.parse_args()

torch.manual_seed(0)
cbtorch.initialize(cs_ip=args.cs_ip, service_workdir=args.model_dir, num_csx=args.num_csx)

model = cbtorch.module(Model())
criterion = nn.CrossEntropyLoss()
optimizer = cbtorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train_dataloader = cbtorch.dataloader(get_train_dataloader())


def report(epoch: int, step: int, loss: torch.Tensor) -> None:
    print(f"Epoch {epoch}, step {step}, Loss: {loss.item()}")


global_step = 0
with cbtorch.Session(model, optimizer, criterion, mode="train") as session:
    for epoch in range(args.num_epochs):
        for step, batch in enumerate(train_dataloader):
            global_step += 1
            optimizer.zero_grad()
            inputs, targets = batch
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            session.add_step_closure(report, args=(epoch, step, loss))

torch.save(model.state_dict(), args.model_dir / f"model_{global_step}.pt")
