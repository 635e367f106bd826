"""Trains a small network in a way that goes wrong, or for so long that something can be done to it meanwhile.

python faults.py MODE [--num-csx N] [--num-steps N] ...; prints a line for each step that a closure saw.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import cerebras.pytorch as cstorch

FEATURES, CLASSES = 20, 5
LONG = 10_000  # steps of a run that is there for something to be done to it


def tensors(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, FEATURES, generator=generator),
        torch.randint(CLASSES, (rows,), generator=generator),
    )


def good(batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors(4 * batch_size)), batch_size=batch_size)


class Fragile(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Cannot read the sample that is the 31st of each pass."""

    def __init__(self, rows: int) -> None:
        self.features, self.labels = tensors(rows)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return decode(index, self.features[index], self.labels[index])


def decode(index: int, features: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if index == 30:
        raise ValueError(f"sample {index} is not a picture")
    return features, label


def raises(batch_size: int) -> DataLoader[Any]:
    return DataLoader(Fragile(4 * batch_size), batch_size=batch_size)


def runs_dry(batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    for _ in range(5):
        yield tensors(batch_size)


def is_empty(batch_size: int) -> Iterable[tuple[torch.Tensor, ...]]:
    return []


def shrinks(batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors(2 * batch_size + 2)), batch_size=batch_size)


def exits(batch_size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    for number in itertools.count():
        if number == 3:
            raise SystemExit(4)
        yield tensors(batch_size)


def has_wrong_label(batch_size: int) -> DataLoader[Any]:
    features, labels = tensors(4 * batch_size)
    labels[2 * batch_size + 1] = CLASSES + 2
    return DataLoader(TensorDataset(features, labels), batch_size=batch_size)


INPUTS: dict[str, Callable[[int], Iterable[object]]] = {
    "raises": raises,
    "runs_dry": runs_dry,
    "is_empty": is_empty,
    "shrinks": shrinks,
    "exits": exits,
    "has_wrong_label": has_wrong_label,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=[*INPUTS, "runs", "no_lowering", "no_rule", "nan", "singular"])
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--num-csx", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, so that there is time")
    parser.add_argument("--losses", action="store_true", help="print them too")
    parser.add_argument("--fails", choices=["in the loop", "after the loop"])
    options = parser.parse_args()

    config = cstorch.distributed.ClusterConfig(
        num_csx=options.num_csx, num_workers_per_csx=options.workers, max_wgt_servers=options.shards
    )
    backend = cstorch.backend("CSX", artifact_dir=options.artifacts, cluster_config=config)
    torch.manual_seed(1)
    with backend.device:
        last = nn.Linear(16, CLASSES)
        model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), last)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        if options.mode == "no_lowering":
            features = torch.fft.fft(features).real
        if options.mode == "no_rule":
            features = torch.cumsum(features, dim=0)
        loss = F.cross_entropy(compiled(features), labels)
        if options.mode == "singular":
            loss = loss + torch.linalg.inv(0 * last.weight[:, :CLASSES]).sum()
        if options.mode == "nan":
            loss = (loss - loss) / (loss - loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def report(loss: torch.Tensor) -> None:
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}")
        print(f"step {executor.user_iteration}{f': {loss.item()!r}' if options.losses else ''}", flush=True)
        if options.pause or options.num_steps > LONG:
            time.sleep(
                options.pause or 0.01
            )  # the cluster waits for the closures: such a run leaves the machine to the others

    loader = cstorch.utils.data.DataLoader(INPUTS.get(options.mode, good), options.batch_size)
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=options.num_steps)
    for batch in executor:
        report(training_step(batch))
        if options.fails == "in the loop" and executor.user_iteration == 3:
            raise FileExistsError("a file is\nthere")
    if options.fails == "after the loop":
        raise FileExistsError("a file is\nthere")
    print("done", flush=True)


if __name__ == "__main__":
    main()
