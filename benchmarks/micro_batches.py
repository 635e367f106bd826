"""Micro-batch sizes: the rates that `micro_batch_size = "explore"` predicts, and those that are measured, in turns.

    python -m benchmarks.micro_batches explore|SIZE

is one run, in a process of its own: of all sizes what is predicted, or of one what is measured.
"""

import itertools
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Before torch: an OpenMP thread that spins takes a core from the other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.show import show

BATCH, WIDTH, LAYERS, STEPS = 512, 512, 6, 60
RUN_SECONDS: Final = 300.0
PREDICTED: Final = re.compile(r"micro_batch_size=(\d+): ([\d,]+) rows/s predicted")


class ReadyBatch(IterableDataset[torch.Tensor]):
    """The same batch again and again, so that the making of input is not measured."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.repeat(torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0)))


def input_fn() -> DataLoader[torch.Tensor]:
    return DataLoader(ReadyBatch(), batch_size=None)


class Notes(logging.Handler):
    """The rates that the client logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.rates: dict[int, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        found = PREDICTED.match(record.getMessage())
        if found is not None:
            self.rates[int(found[1])] = float(found[2].replace(",", ""))


def run(size: str) -> dict[int, float]:
    """Rows per second: as predicted for each size, or as measured for one."""
    import cerebras.pytorch as cstorch

    notes = Notes()
    logger = logging.getLogger("cstorch")
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        backend = cstorch.backend("CSX", artifact_dir=Path(folder), compile_dir=str(Path(folder) / "compile"))
        cstorch.backends.csx.performance.micro_batch_size = "explore" if size == "explore" else int(size)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        model = nn.Sequential(*layers)
        compiled = cstorch.compile(model, backend)
        optimizer = cstorch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        times: list[float] = []

        @cstorch.trace
        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = compiled(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        @cstorch.step_closure
        def keep(loss: torch.Tensor) -> None:
            loss.item()
            times.append(time.perf_counter())

        loader = cstorch.utils.data.DataLoader(input_fn)
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=STEPS):
            keep(step(batch))
    if size == "explore":
        return notes.rates
    half = times[len(times) // 2 :]
    return {int(size): BATCH * (len(half) - 1) / (half[-1] - half[0])}


def _run(size: object) -> dict[int, float]:
    command = [sys.executable, "-m", "benchmarks.micro_batches", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return {int(name): rate for name, rate in json.loads(done.stdout.splitlines()[-1]).items()}


def bench(repeats: int) -> None:
    print(f"{LAYERS} layers {WIDTH} x {WIDTH}, batch {BATCH}, one wafer, weight streaming: rows/s by micro-batch size")
    predicted = _run("explore")
    measured: dict[int, list[float]] = {size: [] for size in predicted if size >= BATCH // 32}
    for _ in range(repeats):
        for size, rates in measured.items():
            rates += _run(size).values()
    best, chosen = max(map(statistics.median, measured.values())), max(predicted, key=predicted.__getitem__)
    for size, rates in measured.items():
        show(f"{size} rows, predicted {predicted[size]:,.0f}", rates, "rows/s")
    share = statistics.median(measured[chosen]) / best
    print(f"  {chosen} rows, predicted to be the fastest, have {share:.2f} of the rate of the fastest measured")


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
