"""Trains the same network in the same way as plain PyTorch, on the CPU backend, or on a cluster; writes what came out.

python parity.py plain|CPU|CSX RESULT.json [--optimizer sgd|adamw] [--reduction mean|sum] [--num-csx N] ...
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

FEATURES, HIDDEN, CLASSES = 20, 32, 5


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.fc3 = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def input_fn(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(5 * batch_size, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (5 * batch_size,), generator=generator)
    return DataLoader(TensorDataset(features, labels), batch_size=batch_size, shuffle=True)


class PlainAdamW:
    """AdamW as the Cerebras API defines it (cstorch_api 2.4), in plain PyTorch."""

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        self.parameters, self.weight_decay, self.count = parameters, weight_decay, 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.count += 1
        correction = (1 - 0.999**self.count) ** 0.5 / (1 - 0.9**self.count)
        for p, m, v in zip(self.parameters, self.first, self.second, strict=True):
            assert p.grad is not None
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.sub_(lr * (correction * m / (v.sqrt() + 1e-6) + self.weight_decay * p))


class PlainSGD:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()


def schedule(step: int, initial: float, steps: int) -> float:
    return initial * (1 - step / steps) + 0.1 * initial * step / steps


def run_plain(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Network()
    parameters = list(model.parameters())
    optimizer = PlainSGD(parameters) if options.optimizer == "sgd" else PlainAdamW(parameters, 0.01)
    losses: list[float] = []
    step = 0
    while step < options.num_steps:
        for features, labels in input_fn(options.batch_size):
            loss = F.cross_entropy(model(features), labels, reduction=options.reduction)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, max_norm=options.max_norm)
            optimizer.step(schedule(step, options.lr, 20))
            losses.append(loss.item())
            step += 1
            if step == options.num_steps:
                break
    return {"losses": losses, "weights": {name: p.tolist() for name, p in model.named_parameters()}}


def run_cstorch(options: argparse.Namespace, on_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """on_step(step) is called when the loss of a step, from 1, is there."""
    import cerebras.pytorch as cstorch

    torch.manual_seed(0)
    if options.mode == "CSX":
        config = cstorch.distributed.ClusterConfig(
            num_csx=options.num_csx, num_workers_per_csx=options.workers, max_wgt_servers=options.shards
        )
        backend = cstorch.backend("CSX", artifact_dir=options.result.parent / "artifacts", cluster_config=config)
    else:
        backend = cstorch.backend("CPU", artifact_dir=options.result.parent / "artifacts")
    with backend.device:
        model = Network()
    compiled = cstorch.compile(model, backend)
    optimizer: cstorch.optim.Optimizer
    if options.optimizer == "sgd":
        optimizer = cstorch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=0.01)
    else:
        optimizer = cstorch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    scheduler = cstorch.optim.lr_scheduler.LinearLR(
        optimizer, initial_learning_rate=options.lr, end_learning_rate=0.1 * options.lr, total_iters=20
    )
    losses: list[float] = []

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        loss = F.cross_entropy(compiled(features), labels, reduction=options.reduction)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=options.max_norm)
        optimizer.step()
        scheduler.step()
        return loss

    @cstorch.step_closure
    def keep(loss: torch.Tensor) -> None:
        losses.append(loss.item())
        on_step(len(losses))

    loader = cstorch.utils.data.DataLoader(input_fn, options.batch_size)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=options.num_steps):
        keep(step(batch))
    return {"losses": losses, "weights": {name: p.detach().cpu().tolist() for name, p in model.named_parameters()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["plain", "CPU", "CSX"])
    parser.add_argument("result", type=Path)
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="adamw")
    parser.add_argument("--reduction", choices=["mean", "sum"], default="mean")
    parser.add_argument("--num-csx", type=int, default=1)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--num-steps", type=int, default=12)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = run_plain(options) if options.mode == "plain" else run_cstorch(options)
    options.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
