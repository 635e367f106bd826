"""Metrics of class numbers, mean, and those of scores, on the CPU: scikit-learn's figures over all batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from metric_cases import CASES, Case, batches, theirs

import cstorch
from cstorch import metrics


@pytest.mark.parametrize(
    ("case", "weighted"),
    [(case, weighted) for case in CASES for weighted in (False, True) if case.weighted or not weighted],
    ids=str,
)
def test_the_figure_so_far_is_that_of_scikit_learn(case: Case, weighted: bool) -> None:
    metric = case.ours()
    seen: list[list[np.ndarray]] = [[], [], []]
    for batch in batches(4, 24):
        for kept, part in zip(seen, batch, strict=True):
            kept.append(part.numpy())
        labels, predictions, weights = batch
        metric(labels.reshape(4, 6), predictions.reshape(4, 6), **({"weights": weights} if weighted else {}))
        y, p, w = map(np.concatenate, seen)
        assert float(metric) == pytest.approx(case.figure(y, p, w if weighted else None), rel=1e-6)
    metric.reset()
    assert metric.num_updates == 0


def test_classes_that_do_not_occur_are_left_out_of_the_mean() -> None:
    y, p = torch.tensor([1, 1, 2, 2]), torch.tensor([1, 2, 2, 2])
    for metric, expected in (
        (metrics.MeanIOUMetric(9), theirs().jaccard_score(y, p, average="macro")),
        (metrics.DiceCoefficientMetric(9, ignore_classes=[3]), theirs().f1_score(y, p, average="macro")),
        (metrics.MeanPerClassAccuracyMetric(9), theirs().balanced_accuracy_score(y, p)),
        (metrics.FBetaScoreMetric(9, average_type="macro"), theirs().f1_score(y, p, average="macro")),
        (metrics.MeanIOUMetric(9, ignore_classes=[1, 2]), 0.0),
    ):
        metric(y, p)
        assert float(metric) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_matrix_with_an_undefined_count_has_no_figure(bad: float) -> None:
    y, p = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2, 2, 1])
    for case in CASES:
        if case.weighted:
            metric = case.ours()
            metric(y, p, weights=torch.tensor([1.0, 1.0, bad, 1.0]))
            assert np.isnan(float(metric)), case
    at_k = metrics.PrecisionAtKMetric(1)
    at_k(torch.tensor([0]), torch.tensor([[0.9, 0.1]]), weights=torch.tensor([bad]))
    assert np.isnan(float(at_k))


class ScoresMetric(metrics.Metric):
    """A metric of a script's own, which multiplies matrices."""

    total: torch.Tensor

    def reset(self) -> None:
        self.register_state("total", torch.zeros(5, 5))

    def update(self, scores: torch.Tensor, weights: torch.Tensor) -> None:
        self.total.add_((scores * weights[:, None]).T @ scores.to(self.total.dtype))

    def compute(self) -> torch.Tensor:
        return self.total.sum()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_autocast_does_not_reach_into_metrics(half: torch.dtype) -> None:
    labels, predictions, weights = batches(1, 500)[0]
    weights = 1e5 * weights + 1
    scores = torch.randn(500, 3)
    layer = torch.nn.Linear(3, 5)
    weighted = [case for case in CASES if case.weighted]
    ours, own = [case.ours() for case in weighted], ScoresMetric()
    with torch.autocast("cpu", half), torch.no_grad():
        found = layer(scores)
        assert found.dtype is half
        for metric in ours:
            metric(labels, predictions, weights=weights)
        own(found, weights)
    for case, metric in zip(weighted, ours, strict=True):
        expected = case.figure(labels.numpy(), predictions.numpy(), weights.numpy())
        assert float(metric) == pytest.approx(expected, rel=1e-6), case
    expected_scores = (found.double() * weights[:, None]).T @ found.double()
    assert float(own) == pytest.approx(float(expected_scores.sum()), rel=1e-4)


def test_labels_out_of_range_do_not_count() -> None:
    metric = metrics.MeanPerClassAccuracyMetric(3)
    metric(torch.tensor([0, -100, 7, 2]), torch.tensor([0, 1, 1, 1]))
    assert metric.confusion_matrix.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert float(metric) == 0.5


def test_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    values, weights = (torch.rand(3, 4, generator=generator) for _ in range(2))
    plain, weighted, numbers = (metrics.MeanMetric(name) for name in ("plain", "weighted", "numbers"))
    for value, weight in zip(values, weights, strict=True):
        plain(value)
        weighted(value, weight)
        numbers(value[0], weight=3)
        numbers(2.0)
    assert float(plain) == pytest.approx(values.mean().item())
    assert float(weighted) == pytest.approx(((values * weights).sum() / weights.sum()).item())
    assert float(numbers) == pytest.approx(((3 * values[:, 0]).sum().item() + 6) / 12)
    assert set(dict(weighted.named_buffers())) == {"mean_value", "weight"}


def test_a_metric_without_a_name_has_that_of_its_class() -> None:
    assert metrics.MeanIOUMetric(2).name == "MeanIOUMetric"
    assert metrics.MeanIOUMetric(2, name="own").name == "own"


def scored(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Labels, scores halfway between the 201 thresholds, weights."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (size,), generator=generator)
    steps = (torch.randint(140, (size,), generator=generator) + 60 * labels).float()
    return labels, (steps + 0.5) / 200, torch.rand(size, generator=generator)


@pytest.mark.parametrize("weighted", [False, True])
def test_area_under_the_roc_curve(weighted: bool) -> None:
    labels, scores, weights = scored(300)
    metric = metrics.AUCMetric(num_thresholds=201)
    for part in torch.arange(300).split(100):
        metric(labels[part], scores[part], weights[part] if weighted else None)
    expected = theirs().roc_auc_score(labels, scores, sample_weight=weights if weighted else None)
    assert float(metric) == pytest.approx(expected, rel=1e-5)


def test_area_under_the_precision_recall_curve() -> None:
    labels, scores, _ = scored(300)
    found = {}
    for method in ("minoring", "interpolation", "majoring"):
        metric = metrics.AUCMetric(201, "PR", summation_method=method)
        metric(labels, scores)
        found[method] = float(metric)
    precision, recall, _ = theirs().precision_recall_curve(labels, scores)
    widths = -np.diff(recall)
    assert found["minoring"] == pytest.approx((widths * np.minimum(precision[:-1], precision[1:])).sum(), abs=0.02)
    # Precision where the counts go on a line from one threshold to the next, summed up finely.
    true = np.array([((scores >= t) & (labels == 1)).sum().item() for t in np.arange(201) / 200])
    all_positive = np.array([(scores >= t).sum().item() for t in np.arange(201) / 200])
    area = 0.0
    for i in range(200):
        way = (np.arange(2000) + 0.5) / 2000
        positives = all_positive[i + 1] + way * (all_positive[i] - all_positive[i + 1])
        right = true[i + 1] + way * (true[i] - true[i + 1])
        area += (true[i] - true[i + 1]) * np.divide(right, positives).mean() if all_positive[i] else 0
    assert found["interpolation"] == pytest.approx(area / true[0], rel=1e-3)
    assert found["minoring"] < found["interpolation"] < found["majoring"]


def test_thresholds_of_the_script() -> None:
    metric = metrics.AUCMetric(thresholds=[0.5])
    metric(torch.tensor([0, 1, 1]), torch.tensor([0.2, 0.4, 0.9]))
    assert float(metric) == pytest.approx(0.75)  # (0, 0), (0, 1/2), (1, 1)


def test_at_k() -> None:
    generator = torch.Generator().manual_seed(0)
    labels, scores = torch.randint(6, (40,), generator=generator), torch.rand(40, 6, generator=generator)
    weights = torch.rand(40, generator=generator)
    recall, precision = metrics.RecallAtKMetric(2), metrics.PrecisionAtKMetric(2)
    for part in torch.arange(40).split(20):
        recall(labels[part], scores[part], weights[part])
        precision(labels[part], scores[part], weights[part])
    expected = theirs().top_k_accuracy_score(labels, scores, k=2, sample_weight=weights)
    assert float(recall) == pytest.approx(expected)
    assert float(precision) == pytest.approx(expected / 2)
    several = metrics.RecallAtKMetric(2)
    several(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0.9, 0.8, 0.1, 0.2], [0.9, 0.1, 0.8, 0.2]]))
    assert float(several) == 0.75


def test_what_csx_does_not_have(tmp_path: Path) -> None:
    cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    for make in (metrics.AUCMetric, lambda: metrics.PrecisionAtKMetric(2), lambda: metrics.RecallAtKMetric(2)):
        with pytest.raises(NotImplementedError, match=r"not supported on CSX.*step closure"):
            make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: metrics.MeanIOUMetric(0),
        lambda: metrics.FBetaScoreMetric(3, beta=0),
        lambda: metrics.FBetaScoreMetric(3, average_type="weighted"),
        lambda: metrics.AUCMetric(curve="XY"),
        lambda: metrics.AUCMetric(summation_method="guess"),
        lambda: metrics.AUCMetric(thresholds=[2.0]),
        lambda: metrics.AUCMetric(num_thresholds=1),
        lambda: metrics.RecallAtKMetric(0),
    ],
)
def test_bad_settings(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


@pytest.mark.parametrize("ignored", ["miou", ["cat"], [1.5]])
def test_what_is_left_out_are_class_numbers(ignored: Any) -> None:
    with pytest.raises(TypeError, match=r"are a list of numbers, not .*; a name is the keyword `name`"):
        metrics.MeanIOUMetric(4, ignored)
