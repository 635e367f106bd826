"""Trains a small network with dropout in several executions, each by a strategy and with a micro-batch size of its own.

python modes.py ARTIFACTS STRATEGY:SIZE...; prints the losses.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

STEPS = 3


def input_fn() -> DataLoader[Any]:
    rows = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=8)


def main() -> None:
    backend = cstorch.backend("CSX", artifact_dir=Path(sys.argv[1]))
    torch.manual_seed(0)
    with backend.device:
        layers = (nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
        model = nn.Sequential(*layers)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []

    @cstorch.trace
    def train(batch: list[torch.Tensor]) -> torch.Tensor:
        rows, wanted = batch
        loss = (compiled(rows) - wanted).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    @cstorch.step_closure
    def keep(loss: torch.Tensor) -> None:
        losses.append(loss.item())

    for part in sys.argv[2:]:
        strategy, _, size = part.partition(":")
        cstorch.backends.csx.performance.execution_strategy = strategy
        cstorch.backends.csx.performance.micro_batch_size = int(size)
        loader = cstorch.utils.data.DataLoader(input_fn)
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=STEPS, checkpoint_steps=STEPS):
            keep(train(batch))
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
