"""Runs closures that sleep, and writes how far the cluster had come each time one began.

python asynchrony.py RESULT.json --num-steps N --bound B
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


def input_fn() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(32, 4, generator=generator)), batch_size=8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds that the first closure sleeps")
    options = parser.parse_args()
    backend = cstorch.backend("CSX", artifact_dir=options.result.parent / "artifacts")
    with backend.device:
        model = nn.Linear(4, 1)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.01)
    with backend.device:
        counter = torch.zeros((), dtype=torch.int64)
    seen: list[tuple[int, int, float]] = []

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = compiled(batch[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counter.add_(1)
        doubled = counter * 1
        record(executor.user_iteration, counter, doubled)
        doubled.mul_(2)  # a closure sees the last value that is set
        return loss

    @cstorch.step_closure
    def record(_: int, count: torch.Tensor, doubled: torch.Tensor) -> None:
        if not seen:
            time.sleep(options.sleep)
        seen.append((count.item(), doubled.item(), time.monotonic()))

    executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=options.num_steps)
    for batch in executor:
        step(batch)
    options.result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
