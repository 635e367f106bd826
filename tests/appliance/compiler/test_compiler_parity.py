"""Whole steps on simulated clusters: every number of wafers and shards gives what plain torch gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Getters, Step, Traced
from torch import nn
from torch.nn import functional as F

from cstorch._internal.state import Registry, named_getters
from cstorch.metrics import AccuracyMetric
from cstorch.optim import SGD, AdamW, Optimizer
from cstorch.optim.lr_scheduler import LinearLR

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.last = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.fc2(F.relu(self.fc1(x)))))


def digits(steps: int = 2, classes: int = 5) -> list[Any]:
    return [(torch.randn(BATCH, 20, dtype=torch.float64), torch.randint(classes, (BATCH,))) for _ in range(steps)]


def training(
    make: Callable[[Any], Optimizer],
    reduction: str = "mean",
    clip: float | None = None,
    schedule: bool = False,
    metric: bool = False,
) -> Callable[[Any], tuple[Step, Getters]]:
    def build(model: Any) -> tuple[Step, Getters]:
        registry = Registry()
        optimizer = make(model.parameters())
        registry.register("optimizer", optimizer)
        scheduler = LinearLR(optimizer, 0.1, 0.01, 10) if schedule else None
        if scheduler is not None:
            registry.register("scheduler", scheduler)
        accuracy = AccuracyMetric("accuracy") if metric else None
        if accuracy is not None:
            registry.register("metric", accuracy)

        def step(batch: Any) -> Any:
            images, labels = batch
            logits = model(images)
            loss = F.cross_entropy(logits, labels, reduction=reduction)
            optimizer.zero_grad()
            loss.backward()
            outputs = [loss]
            if clip is not None:
                outputs.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            if accuracy is not None:
                outputs.append(accuracy(labels, logits.argmax(-1)))
            return outputs

        return step, dict(named_getters(registry))

    return build


@pytest.mark.parametrize(
    "build",
    [
        training(lambda p: SGD(p, lr=0.1)),
        training(lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1), reduction="sum", clip=0.5),
        training(lambda p: AdamW(p, lr=0.01, weight_decay=0.1), clip=0.5, schedule=True, metric=True),
    ],
    ids=["sgd", "sum-momentum-clip", "adamw-clip-schedule-metric"],
)
def test_training(build: Any) -> None:
    batches = digits()
    Traced(build, Network(), batches[0]).check(batches, rtol=1e-6)


def sgd(model: nn.Module, rate: float = 0.1) -> None:
    """In place, as a user would write it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * rate)
    model.zero_grad()


def var_mean(made: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(made, 0)
    return 0 + variance.sum() + mean.sum()


def train(loss_of: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any], Step]:
    """A step with plain SGD that returns the loss."""

    def build(model: Any) -> Step:
        def step(batch: Any) -> torch.Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            sgd(model)
            return loss.detach()

        return step

    return build


LOSSES: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "mse": lambda m, b: F.mse_loss(m(b[0]), b[0][:, :5] * 0.5),
    "mse-sum": lambda m, b: F.mse_loss(m(b[0]), b[0][:, :5] * 0.5, reduction="sum"),
    "mse-of-none": lambda m, b: F.mse_loss(m(b[0]), b[0][:, :5] * 0.5, reduction="none").amax(1).mean(),
    "smooth-l1": lambda m, b: F.smooth_l1_loss(m(b[0]), b[0][:, :5]),
    "huber": lambda m, b: F.huber_loss(m(b[0]), b[0][:, :5], delta=0.3),
    "bce-logits": lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]), (b[0][:, :5] > 0).double()),
    "bce": lambda m, b: F.binary_cross_entropy(torch.sigmoid(m(b[0])), (b[0][:, :5] > 0).double()),
    "weighted": lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=m.last.bias.detach().abs() + 1),
    "ignored": lambda m, b: F.cross_entropy(m(b[0]), torch.where(b[1] > 1, b[1], 2), ignore_index=2),
    "ignored-weighted": lambda m, b: F.cross_entropy(m(b[0]), b[1], m.last.bias.detach().abs() + 1, ignore_index=1),
    "smoothed": lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1),
    "none": lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="none") * b[0][:, 0].abs()).mean(),
    "mean-of-squares": lambda m, b: m(b[0]).pow(2).mean(),
    "mean-over-classes": lambda m, b: m(b[0]).mean(1).exp().mean(),
    "norm": lambda m, b: m(b[0]).norm() + torch.linalg.vector_norm(m(b[0]), dim=0).sum(),
    "variance": lambda m, b: m(b[0]).var(0).sum() + m(b[0]).std(),
    "var-mean": lambda m, b: var_mean(m(b[0])),
    "maximum": lambda m, b: m(b[0]).amax(0).sum() + m(b[0]).amin(),
    "two-uses": lambda m, b: m(b[0]).sum() * m(b[0]).mean(),
    "scaled-by-state": lambda m, b: (m(b[0]) * m.last.bias.sum() + m.last.bias * m.fc1.bias[:5]).sum(),
    "bias-added": lambda m, b: ((b[0] @ m.fc1.weight.t() + m.fc1.bias) * m.fc2.bias).mean(),
    "gram": lambda m, b: (m(b[0]).t() @ m(b[0])).pow(2).sum(),
    "stacked": lambda m, b: torch.stack([m(b[0]), b[0][:, :5]], 1).pow(2).mean(),
    "concatenated": lambda m, b: torch.cat([m(b[0]), b[0]], 1).pow(2).mean(),
    "split": lambda m, b: sum(t.pow(i + 2).sum() for i, t in enumerate(m(b[0]).split([2, 3], 1))),
    "selected": lambda m, b: (m(b[0])[:, 1] * m(b[0])[:, -1] + m(b[0])[:, 1:3].sum(1)).sum(),
    "gathered": lambda m, b: -F.log_softmax(m(b[0]), 1).gather(1, b[1][:, None]).mean(),
    "one-hot": lambda m, b: (F.one_hot(b[1], 5).double() * m(b[0])).sum(),
    "masked": lambda m, b: m(b[0]).masked_fill(b[0][:, :5] > 0, 0.5).sum(),
    "branches": lambda m, b: torch.where(m(b[0]) > 0, m(b[0]), m.last.bias).clamp(-0.5, 0.5).sum(),
    "rows-of-a-state": lambda m, b: m.fc1.weight[b[1]].pow(2).sum(),
    "index-select": lambda m, b: torch.index_select(m.fc1.weight, 0, b[1]).pow(2).mean(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_and_their_gradients(loss: Callable[[Any, Any], torch.Tensor]) -> None:
    batches = digits()
    Traced(train(loss), Network(), batches[0]).check(batches, [(1, 1), (3, 2)], seeds=[1])
