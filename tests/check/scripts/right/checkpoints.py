"""Saves model, optimizer and schedule in a closure, and goes on from the checkpoint."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(10)
folder = Path(tempfile.mkdtemp())
backend = cstorch.backend("CSX", artifact_dir=folder)
with backend.device:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = cstorch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 0.001, 20)


def input_fn():
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss


@cstorch.checkpoint_closure
def save(step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    cstorch.save({**state, "step": step}, folder / f"checkpoint_{step}.mdl")


def train(num_steps):
    loader = cstorch.utils.data.DataLoader(input_fn)
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=num_steps, checkpoint_steps=2)
    for batch in executor:
        training_step(batch)
        save(executor.user_iteration)


train(2)
state = cstorch.load(folder / "checkpoint_2.mdl")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
scheduler.load_state_dict(state["scheduler"])
train(2)
