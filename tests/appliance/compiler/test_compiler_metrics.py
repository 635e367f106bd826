"""Metrics over several steps on simulated clusters: the sums of all wafers."""

from typing import Any

import pytest
import torch
from compiled_steps import Getters, Step, Traced
from metric_cases import CASES, CLASSES, batches
from plan_simulator import Simulation
from torch import nn

from appliance.compiler.core.precision_table import LEVELS
from appliance.compiler.pipeline import Half, Precision
from cstorch._internal.state import Registry, named_getters
from cstorch.metrics import MeanMetric, Metric

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


class ProductMetric(Metric):
    """A metric of a script's own, which multiplies matrices."""

    total: torch.Tensor

    def reset(self) -> None:
        self.register_state("total", torch.zeros(CLASSES, CLASSES))

    def update(self, scores: torch.Tensor, weights: torch.Tensor) -> None:
        self.total.add_((scores * weights.unsqueeze(1)).T @ scores)

    def compute(self) -> torch.Tensor:
        return self.total.clone()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", Half)
def test_mixed_precision_does_not_reach_into_metrics(half: Half, level: int) -> None:
    """Of the same scores, which are computed in half, the figures are those of float32, exactly where they count."""

    def build(model: Any) -> tuple[Step, Getters]:
        registry = Registry()
        metrics = [case.ours() for case in CASES if case.weighted]
        product, mean = ProductMetric("product"), MeanMetric("mean")
        for metric in (*metrics, product, mean):
            registry.register("metric", metric)

        def step(batch: Any) -> Any:
            labels, predictions, weights, inputs = batch
            scores = model(inputs)
            found = [metric(labels, predictions, weights=weights) for metric in metrics]
            return [scores, mean(scores, 1e5), product(scores, weights), *found]

        return step, dict(named_getters(registry))

    torch.manual_seed(0)
    labels, predictions, weights = batches(1, 24)[0]
    weights = 1e5 * weights + 1  # neither in the range of float16 nor exact in bfloat16
    inputs = [labels, predictions, weights, torch.randn(24, 3)]
    traced = Traced(build, nn.Linear(3, CLASSES), inputs, double=False)
    for wafers in (1, 2):
        plan = traced.plan(wafers, precision=Precision(half=half, level=level))
        scores, mean, product, *found = Simulation(plan, traced.initial).run([inputs])[0].values()
        torch.testing.assert_close(mean, scores.mean(), rtol=1e-5, atol=1e-6)
        expected = (scores.double() * weights.unsqueeze(1)).T @ scores.double()
        torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1.0)
        weighted = [case for case in CASES if case.weighted]
        for case, figure in zip(weighted, found, strict=True):
            wanted = case.figure(labels.numpy(), predictions.numpy(), weights.numpy())
            assert float(figure) == pytest.approx(wanted, rel=1e-6), case
