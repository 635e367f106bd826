"""Runs closures, the first of which sleeps, and writes what they saw and when, and when the batches were made.

python asynchrony.py RESULT.json --num-steps N [--sleep SECONDS]
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn

import cerebras.pytorch as cstorch


def input_fn(record: Path) -> Iterator[tuple[torch.Tensor]]:
    """Notes each batch with the time, on the clock that all processes of a host share."""
    generator = torch.Generator().manual_seed(1)
    while True:
        with record.open("a") as file:
            file.write(f"{time.monotonic()}\n")
        yield (torch.randn(8, 4, generator=generator),)


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
    closures: list[tuple[int, int, float]] = []
    sleep: list[float] = []

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = compiled(batch[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        counter.add_(1)
        doubled = counter * 1
        record(counter, doubled)
        doubled.mul_(2)  # a closure sees the last value that is set
        return loss

    @cstorch.step_closure
    def record(count: torch.Tensor, doubled: torch.Tensor) -> None:
        closures.append((int(count), int(doubled), time.monotonic()))
        if not sleep:
            sleep.append(time.monotonic())
            time.sleep(options.sleep)
            sleep.append(time.monotonic())

    batches = options.result.with_suffix(".batches")
    loader = cstorch.utils.data.DataLoader(input_fn, batches)
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=options.num_steps)
    for batch in executor:
        step(batch)
    made = [float(line) for line in batches.read_text().splitlines()]
    # The first is that of the batch that the client takes from the input_fn.
    options.result.write_text(json.dumps({"closures": closures, "sleep": sleep, "batches": made[1:]}))


if __name__ == "__main__":
    main()
