"""Trains a network with dropout, prints what it gets bit for bit, and saves checkpoints.

It stops behind the step STOP until the file "go" is in the working directory, so that a test has time to harm the
cluster.
"""

import argparse
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

FEATURES, CLASSES, ROWS = 24, 5, 64


def batches(restartable: bool) -> Any:
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(ROWS * 9, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (ROWS * 9,), generator=generator)
    loader: Any = DataLoader(TensorDataset(features, labels), batch_size=ROWS, shuffle=True)
    return Counted(loader) if restartable else loader


class Counted:
    """A loader that can be resumed: its position is a count of batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._begin = torch.get_rng_state()
        self._count = 0
        self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        torch.set_rng_state(self._begin)
        for number, batch in enumerate(self._endless()):
            if number >= self._skip:
                self._count = number + 1
                yield batch

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def state_dict(self) -> dict[str, int]:
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, int], strict: bool = True) -> None:
        self._skip = state["count"]

    def aggregate_state_dict(self, states: list[dict[str, int]]) -> dict[str, int]:
        return states[0]

    def deaggregate_state_dict(self, state: dict[str, int], strict: bool = True) -> dict[str, int]:
        return state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--num-csx", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stop", type=int, default=30)
    parser.add_argument("--checkpoint-steps", type=int, default=25)
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--restartable", action="store_true")
    parser.add_argument("--pipeline", action="store_true", help="layer pipelined mode")
    parser.add_argument("--half-gradients", action="store_true", help="mixed precision in bfloat16, gradients included")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, so that there is time")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = cstorch.distributed.ClusterConfig(
        num_csx=options.num_csx,
        max_wgt_servers=options.shards,
        num_workers_per_csx=options.workers,
        lane=options.lane,
    )
    if options.pipeline:
        cstorch.backends.csx.performance.execution_strategy = "pipeline"
    if options.half_gradients:
        cstorch.amp.set_half_dtype("bfloat16")
        cstorch.amp.enable_mixed_precision()
        cstorch.backends.csx.precision.half_gradients = True
    backend = cstorch.backend("CSX", artifact_dir=options.artifacts, cluster_config=config)
    with backend.device:
        model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, CLASSES))
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = cstorch.optim.lr_scheduler.LinearLR(
        optimizer, initial_learning_rate=0.02, end_learning_rate=0.001, total_iters=50
    )

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        loss = F.cross_entropy(compiled(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    step = 0

    @cstorch.step_closure
    def show(loss: torch.Tensor) -> None:
        nonlocal step
        step += 1
        print(f"{step} {float(loss).hex()}", flush=True)
        time.sleep(options.pause)
        while step == options.stop and not Path("go").exists():
            time.sleep(0.01)

    @cstorch.checkpoint_closure
    def save(number: int) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        cstorch.save(state, f"checkpoint_{number}.mdl")

    loader = cstorch.utils.data.DataLoader(batches, options.restartable)
    executor = cstorch.utils.data.DataExecutor(
        loader, num_steps=options.steps, checkpoint_steps=options.checkpoint_steps
    )
    for batch in executor:
        show(training_step(batch))
        save(executor.user_iteration)
    for name, value in model.state_dict().items():
        print(name, hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest(), flush=True)
    for path in sorted(Path().glob("checkpoint_*.mdl")):
        state = cstorch.load(path)
        digest = hashlib.sha256()
        for key, value in sorted(state["model"].items()):
            digest.update(key.encode() + value.numpy().tobytes())
        print(path, digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
