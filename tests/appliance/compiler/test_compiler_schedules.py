"""Every schedule in a step on a simulated cluster: the values, and what is updated with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Getters, Step, Traced
from schedule_cases import CASES
from torch import nn
from torch.nn import functional as F

from cstorch._internal.state import Registry, named_getters
from cstorch.optim import AdamW, Optimizer
from cstorch.optim.lr_scheduler import LinearLR, ScalePerParamLR, SequentialLR, StepLR
from cstorch.optim.scheduler import Scheduler
from cstorch.optim.weight_decay_scheduler import CosineDecayWD

pytestmark = pytest.mark.parity


def build(make: Callable[[Optimizer], list[Scheduler]]) -> Any:
    def built(model: Any) -> tuple[Step, Getters]:
        registry = Registry()
        groups: list[dict[str, Any]] = [
            {"params": [model.weight], "adjust_learning_rate": 0.5},
            {"params": [model.bias]},
        ]
        optimizer = AdamW(groups, lr=0.01)
        registry.register("optimizer", optimizer)
        schedules = make(optimizer)
        for schedule in schedules:
            for part in [*getattr(schedule, "_schedulers", []), schedule]:
                registry.register("scheduler", part)

        def step(batch: Any) -> Any:
            features, labels = batch
            loss = F.cross_entropy(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values = [schedule.get() for schedule in schedules]
            for schedule in schedules:
                schedule.step()
            return [loss, *values]

        return step, dict(named_getters(registry))

    return built


def check(make: Callable[[Optimizer], list[Scheduler]], steps: int) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(BATCH, 5, dtype=torch.float64), torch.randint(3, (BATCH,))) for _ in range(steps)]
    Traced(build(make), nn.Linear(5, 3), batches[0]).check(batches, [(2, 2)], rtol=1e-6)


def test_every_form() -> None:
    check(lambda optimizer: [case.learning_rate(optimizer) for case in CASES], 6)


def test_learning_rate_and_weight_decay_together() -> None:
    def make(optimizer: Optimizer) -> list[Scheduler]:
        parts = [LinearLR(optimizer, 0.0, 0.1, 3), StepLR(optimizer, 0.1, 2, 0.5)]
        rate = ScalePerParamLR(optimizer, SequentialLR(optimizer, parts, [3]))
        return [rate, CosineDecayWD(optimizer, 0.1, 0.0, 5)]

    check(make, 6)
