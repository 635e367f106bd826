"""Metrics of class numbers, with scikit-learn's functions for the same figures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cstorch import metrics
from cstorch.metrics import Metric

CLASSES = 5
KEPT = [1, 2, 4]


def theirs() -> Any:
    """Returns scikit-learn's metrics. Their import takes a second, which the collection of tests does not need."""
    from sklearn import metrics

    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A metric, and scikit-learn's function of labels, predictions and weights."""

    name: str
    ours: Callable[[], Metric]
    figure: Callable[[np.ndarray, np.ndarray, Any], float]
    weighted: bool = True

    def __str__(self) -> str:
        return self.name


def _f(average: str, beta: float, labels: list[int] | None = None) -> Callable[..., float]:
    return lambda y, p, w: theirs().fbeta_score(y, p, beta=beta, average=average, labels=labels, zero_division=0)


CASES = [
    Case(
        name="accuracy",
        ours=lambda: metrics.AccuracyMetric("accuracy"),
        figure=lambda y, p, w: theirs().accuracy_score(y, p),
        weighted=False,  # Each prediction counts 1, without its weight.
    ),
    Case(
        name="iou",
        ours=lambda: metrics.MeanIOUMetric(CLASSES),
        figure=lambda y, p, w: theirs().jaccard_score(y, p, average="macro", sample_weight=w),
    ),
    Case(
        name="iou of some",
        ours=lambda: metrics.MeanIOUMetric(CLASSES, ignore_classes=[0, 3]),
        figure=lambda y, p, w: theirs().jaccard_score(y, p, average="macro", labels=KEPT, sample_weight=w),
    ),
    Case(
        name="dice",
        ours=lambda: metrics.DiceCoefficientMetric(CLASSES),
        figure=lambda y, p, w: theirs().f1_score(y, p, average="macro", sample_weight=w),
    ),
    Case(
        name="dice of some",
        ours=lambda: metrics.DiceCoefficientMetric(CLASSES, ignore_classes=[0, 3]),
        figure=lambda y, p, w: theirs().f1_score(y, p, average="macro", labels=KEPT, sample_weight=w),
    ),
    Case(
        name="accuracy of a class",
        ours=lambda: metrics.MeanPerClassAccuracyMetric(CLASSES),
        figure=lambda y, p, w: theirs().balanced_accuracy_score(y, p, sample_weight=w),
    ),
    Case(name="f1", ours=lambda: metrics.FBetaScoreMetric(CLASSES), figure=_f("micro", 1), weighted=False),
    Case(
        name="f2 macro",
        ours=lambda: metrics.FBetaScoreMetric(CLASSES, 2, "macro"),
        figure=_f("macro", 2),
        weighted=False,
    ),
    Case(
        name="f1 micro of some",
        ours=lambda: metrics.FBetaScoreMetric(CLASSES, ignore_labels=[0, 3]),
        figure=_f("micro", 1, KEPT),
        weighted=False,
    ),
    Case(
        name="f half macro of some",
        ours=lambda: metrics.FBetaScoreMetric(CLASSES, 0.5, "macro", [0, 3]),
        figure=_f("macro", 0.5, KEPT),
        weighted=False,
    ),
]


def batches(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Returns batches of labels, predictions (half of them random) and weights."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        labels, guesses = (torch.randint(CLASSES, (size,), generator=generator) for _ in range(2))
        predictions = torch.where(torch.rand(size, generator=generator) < 0.5, labels, guesses)
        found.append((labels, predictions, torch.randint(3, (size,), generator=generator).float()))
    return found
