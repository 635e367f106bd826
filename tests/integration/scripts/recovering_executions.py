"""Trains, evaluates, changes states, and trains and evaluates again in one job; prints what it gets bit for bit.

The network has dropout and batch norm, its loss is scaled dynamically, and there are metrics in training and
evaluation. Checkpoints are saved on the way and between the executions.
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
from recovering import Counted
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

FEATURES, CLASSES, ROWS, PASS = 24, 5, 64, 9


def batches(seed: int, restartable: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(ROWS * PASS, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (ROWS * PASS,), generator=generator)
    loader: Any = DataLoader(TensorDataset(features, labels), batch_size=ROWS, shuffle=True)
    return Counted(loader) if restartable else loader


def digest(state: Any) -> str:
    """Of all tensors and numbers of a nest, with their names."""
    hashed = hashlib.sha256()
    for name, value in leaves("", state):
        data = value.detach().cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        hashed.update(name.encode() + data)
    return hashed.hexdigest()[:16]


def leaves(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from leaves(f"{name}.{key}", state[key])
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from leaves(f"{name}.{number}", value)
    else:
        yield name, state


class Script:
    """What the executions share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.count = 0
        config = cstorch.distributed.ClusterConfig(
            num_csx=options.num_csx,
            max_wgt_servers=options.shards,
            num_workers_per_csx=options.workers,
            lane=options.lane,
            changes_need_checkpoint=False,
        )
        backend = cstorch.backend("CSX", artifact_dir=options.artifacts, cluster_config=config)
        with backend.device:
            self.model = nn.Sequential(
                nn.Linear(FEATURES, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 256),
                nn.ReLU(), nn.Linear(256, CLASSES),
            )  # fmt: skip
        self.compiled = cstorch.compile(self.model, backend)
        self.optimizer = cstorch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = cstorch.optim.lr_scheduler.LinearLR(
            self.optimizer, initial_learning_rate=0.02, end_learning_rate=0.001, total_iters=50
        )
        self.scaler = cstorch.amp.GradScaler("dynamic", init_scale=2.0**20, steps_per_increase=5)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def save(self, name: str) -> None:
        """A checkpoint, and what is in it."""
        cstorch.save(self.state(), f"{name}.mdl")
        print(f"{name}: {digest(cstorch.load(f'{name}.mdl'))}", flush=True)

    def say(self, words: str) -> None:
        print(words, flush=True)
        time.sleep(self.options.pause)

    def train(self, name: str, seed: int) -> None:
        self.model.train()
        accuracy = cstorch.metrics.AccuracyMetric(f"{name} accuracy")

        @cstorch.trace
        def step(batch: list[torch.Tensor]) -> torch.Tensor:
            features, labels = batch
            logits = self.compiled(features)
            loss = F.cross_entropy(logits, labels)
            cstorch.amp.optimizer_step(loss, self.optimizer, self.scaler)
            self.schedule.step()
            accuracy(labels=labels, predictions=logits.argmax(-1).int())
            return loss

        @cstorch.step_closure
        def show(loss: torch.Tensor) -> None:
            self.count += 1
            self.say(f"{name} {self.count} {float(loss).hex()} {float(accuracy).hex()}")

        @cstorch.checkpoint_closure
        def save(number: int) -> None:
            self.save(f"{name}_{number}")

        steps = self.options.steps
        loader = cstorch.utils.data.DataLoader(batches, seed, self.options.restartable)
        executor = cstorch.utils.data.DataExecutor(loader, num_steps=steps, checkpoint_steps=steps // 2)
        for batch in executor:
            show(step(batch))
            save(executor.user_iteration)

    def evaluate(self, name: str) -> None:
        self.model.eval()
        accuracy, mean = cstorch.metrics.AccuracyMetric("accuracy"), cstorch.metrics.MeanMetric("mean loss")

        @cstorch.trace
        def step(batch: list[torch.Tensor]) -> torch.Tensor:
            features, labels = batch
            with torch.no_grad():
                logits = self.compiled(features)
                loss = F.cross_entropy(logits, labels)
            accuracy(labels=labels, predictions=logits.argmax(-1).int())
            mean(loss)
            return loss

        @cstorch.step_closure
        def show(loss: torch.Tensor) -> None:
            self.count += 1
            self.say(f"{name} {self.count} {float(loss).hex()} {float(accuracy).hex()} {float(mean).hex()}")

        loader = cstorch.utils.data.DataLoader(batches, 3, self.options.restartable)
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=self.options.steps // 2):
            show(step(batch))

    def change(self) -> None:
        """What a script does to states between executions."""
        state = self.model.state_dict()
        self.say(f"read {digest(state)}")
        state["6.weight"] = state["6.weight"].cpu() * 0.5
        self.model.load_state_dict(state)
        self.say("changed")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--artifacts", type=Path, required=True)
    parser.add_argument("--num-csx", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24, help="of a training")
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--restartable", action="store_true")
    parser.add_argument("--pipeline", action="store_true", help="layer pipelined mode")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, so that there is time")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.pipeline:
        cstorch.backends.csx.performance.execution_strategy = "pipeline"
    script = Script(options)
    script.train("train", 7)
    script.evaluate("evaluate")
    script.save("between")
    script.train("again", 8)
    script.change()
    script.evaluate("last")
    script.train("third", 7)
    script.say(f"end {digest(script.state())}")


if __name__ == "__main__":
    main()
