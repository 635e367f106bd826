"""Metrics over several steps on simulated clusters: the sums of all wafers."""

from typing import Any

import pytest
import torch
from compiled_steps import Getters, Step, Traced
from metric_cases import CASES, CLASSES, batches
from torch import nn

from cstorch._internal.state import Registry, named_getters
from cstorch.metrics import MeanMetric

pytestmark = pytest.mark.parity


def build(model: Any) -> tuple[Step, Getters]:
    registry = Registry()
    metrics = [(case, case.ours()) for case in CASES]
    mean = MeanMetric("mean")
    for metric in (*(metric for _, metric in metrics), mean):
        registry.register("metric", metric)

    def step(batch: Any) -> Any:
        labels, predictions, weights, scores = batch
        scores = model(scores)
        found = [
            metric(labels, predictions, **({"weights": weights} if case.weighted else {})) for case, metric in metrics
        ]
        return [mean(scores.sum()), mean(scores, weights.unsqueeze(1)), *found]

    return step, dict(named_getters(registry))


def test_all_that_csx_has() -> None:
    torch.manual_seed(0)
    inputs = [(*batch, torch.randn(24, 3)) for batch in batches(3, 24)]
    Traced(build, nn.Linear(3, CLASSES), inputs[0], double=False).check(inputs, [(1, 1), (2, 2), (3, 1)], rtol=1e-5)
