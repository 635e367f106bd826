"""Steps per second of the 784-256-256-10 network at batch 64 with AdamW: one run of eager PyTorch or of the cluster.

Run by `python -m benchmarks`, which alternates the two; each run is a process of its own:

    python -m benchmarks.fc_training eager|cluster --num-steps N --threads T
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Before torch: an OpenMP thread that spins takes a core from the other processes. Eager gets the same policy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

BATCH = 64


class ReadyBatches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Eight batches made beforehand, so that neither side measures the making of input."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(8, BATCH, 784, generator=generator)
        labels = images[:, :, :10].argmax(-1)
        while True:
            yield from zip(images, labels, strict=True)


def input_fn() -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    return DataLoader(ReadyBatches(), batch_size=None)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def rate(times: list[float]) -> float:
    """Median steps per second over windows of 50 steps, the first quarter left out."""
    times = times[len(times) // 4 :]
    windows = [50 / (times[i + 50] - times[i]) for i in range(0, len(times) - 50, 50)]
    return statistics.median(windows)


def run_eager(num_steps: int, threads: int) -> float:
    torch.set_num_threads(threads)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    times: list[float] = []
    for _, (images, labels) in zip(range(num_steps), input_fn(), strict=False):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter())
    return rate(times)


def run_cluster(num_steps: int, threads: int) -> float:
    import cerebras.pytorch as cstorch

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        backend = cstorch.backend("CSX", artifact_dir=Path(folder), compile_dir=str(Path(folder) / "compile"))
        with backend.device:
            model = network()
        compiled = cstorch.compile(model, backend)
        optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-3)
        times: list[float] = []

        @cstorch.trace
        def step(batch: list[torch.Tensor]) -> torch.Tensor:
            images, labels = batch
            loss = F.cross_entropy(compiled(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        @cstorch.step_closure
        def keep(loss: torch.Tensor) -> None:
            loss.item()
            times.append(time.perf_counter())

        loader = cstorch.utils.data.DataLoader(input_fn)
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=num_steps):
            keep(step(batch))
        return rate(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["eager", "cluster"])
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    run = run_eager if options.side == "eager" else run_cluster
    print(json.dumps({"steps_per_second": run(options.num_steps, options.threads)}))


if __name__ == "__main__":
    main()
