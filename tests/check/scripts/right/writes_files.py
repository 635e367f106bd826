"""A script without seeds that writes, in a new folder, what it and its loader read by relative names."""

import json
import logging
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

out = Path("out")
os.makedirs(out)
(out / "index.json").write_text(json.dumps({"samples": 64}))
logging.basicConfig(filename=out / "train.log", level=logging.INFO)

backend = cstorch.backend("CSX", artifact_dir=out / "artifacts")
model = nn.Linear(8, 4)
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
os.chdir(out)


def input_fn():
    samples = json.loads(Path("index.json").read_text())["samples"]
    return DataLoader(TensorDataset(torch.randn(samples, 8), torch.randint(4, (samples,))), 16, shuffle=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@cstorch.step_closure
def log(loss):
    logging.info("loss %s", loss.item())
    with open("losses.csv", "a") as losses:
        losses.write(f"{loss.item()}\n")


@cstorch.checkpoint_closure
def save():
    cstorch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.mdl")


executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=3, checkpoint_steps=3)
for batch in executor:
    log(training_step(batch))
    save()
torch.save(model.state_dict(), "final.pt")
assert cstorch.load("checkpoint.mdl")["model"]["weight"].shape == (4, 8)
assert len(Path("losses.csv").read_text().splitlines()) == 3
assert "loss" in Path("train.log").read_text()
