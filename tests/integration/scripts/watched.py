"""Trains a small network for so many steps that it can be looked at meanwhile; its input_fn prints.

python watched.py --artifacts DIR --num-steps N; prints step and loss, as it is, for each output. It goes slowly until
the file "go" is in the working directory.
"""

import argparse
import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

SLOW_SECONDS = 0.1


def input_fn(batch_size: int) -> DataLoader[Any]:
    print("the input function prints")
    logging.getLogger("mine").warning("the input function logs")
    generator = torch.Generator().manual_seed(1)
    features, labels = torch.randn(64, 20, generator=generator), torch.randint(5, (64,), generator=generator)
    return DataLoader(TensorDataset(features, labels), batch_size=batch_size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--num-steps", type=int, required=True)
    options = parser.parse_args()
    backend = cstorch.backend("CSX", artifact_dir=options.artifacts)
    torch.manual_seed(0)
    with backend.device:
        model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5))
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        loss = F.cross_entropy(compiled(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def report(loss: torch.Tensor) -> None:
        print(executor.user_iteration, float(loss.item()).hex(), flush=True)
        if not Path("go").exists():
            time.sleep(SLOW_SECONDS)

    @cstorch.step_closure
    def add_scalar(name: str, value: torch.Tensor) -> None:
        assert name == "train/loss"

    loader = cstorch.utils.data.DataLoader(input_fn, 8)
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=options.num_steps)
    for batch in executor:
        loss = training_step(batch)
        add_scalar("train/loss", loss)
        report(loss)


if __name__ == "__main__":
    main()
