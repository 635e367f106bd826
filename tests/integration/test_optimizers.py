"""Every optimizer and every metric on the CPU backend and on a running cluster of 2 wafers and 2 shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
from cluster_rig import RunningCluster
from metric_cases import CASES as METRICS
from optimizer_cases import BASIC, Case
from test_exactness import assert_close
from torch import nn
from torch.nn import functional as F

import cerebras.pytorch as cstorch

BATCH_SIZE, STEPS = 24, 20

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def management(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)


def network(case: Case | None = None) -> nn.Module:
    bias = case is None or not case.only_matrices
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(parity.FEATURES, 8, bias=bias), nn.Tanh(), nn.Linear(8, parity.CLASSES, bias=bias))


def plain_batches() -> Iterator[list[torch.Tensor]]:
    left = STEPS
    while left:
        for batch in parity.input_fn(BATCH_SIZE):
            yield batch
            left -= 1
            if not left:
                return


def plain_training(case: Case) -> tuple[list[float], list[Any]]:
    model = network(case)
    optimizer = case.reference(model.parameters())
    losses = []
    for features, labels in plain_batches():
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.tolist() for p in model.parameters()]


def make_backend(kind: str, folder: Path) -> Any:
    if kind == "CPU":
        return cstorch.backend("CPU", artifact_dir=folder / "artifacts")
    config = cstorch.distributed.ClusterConfig(num_csx=2, num_workers_per_csx=1, max_wgt_servers=2)
    return cstorch.backend("CSX", artifact_dir=folder / "artifacts", cluster_config=config)


def batches() -> Any:
    loader = cstorch.utils.data.DataLoader(parity.input_fn, BATCH_SIZE)
    return cstorch.utils.data.DataExecutor(loader, num_steps=STEPS)


@pytest.mark.parametrize("kind", ["CPU", "CSX"])
@pytest.mark.parametrize("case", BASIC, ids=str)
def test_every_optimizer_trains_as_in_plain_pytorch(case: Case, kind: str, tmp_path: Path) -> None:
    expected_losses, expected_weights = plain_training(case)
    backend = make_backend(kind, tmp_path)
    model = network(case)
    compiled = cstorch.compile(model, backend)
    optimizer = case.ours(model.parameters())
    losses: list[float] = []

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        features, labels = batch
        loss = F.cross_entropy(compiled(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def keep(loss: torch.Tensor) -> None:
        losses.append(loss.item())

    for batch in batches():
        keep(step(batch))
    assert_close("losses", losses, expected_losses)
    for parameter, weight in zip(model.parameters(), expected_weights, strict=True):
        assert_close("weight", parameter.detach().cpu().tolist(), weight)


class Largest(cstorch.metrics.Metric):
    """A script's own."""

    largest: torch.Tensor

    def reset(self) -> None:
        self.register_state("largest", torch.tensor(-1.0))

    def update(self, values: torch.Tensor) -> None:
        self.largest.copy_(torch.maximum(self.largest, values.max()))

    def compute(self) -> torch.Tensor:
        return self.largest.clone()


def test_every_metric_of_an_evaluation_is_that_of_scikit_learn(tmp_path: Path) -> None:
    model = network()
    seen = [(labels.numpy(), model(features).argmax(-1).numpy()) for features, labels in plain_batches()]
    labels, predictions = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    backend = make_backend("CSX", tmp_path)
    model = network()
    compiled = cstorch.compile(model, backend)
    compiled.eval()
    metrics = [case.ours() for case in METRICS]
    mean, largest = cstorch.metrics.MeanMetric("mean label"), Largest("largest feature")

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> None:
        features, labels = batch
        with torch.no_grad():
            predictions = compiled(features).argmax(-1)
        mean(labels)
        largest(features)
        for metric in metrics:
            metric(labels, predictions)

    for batch in batches():
        step(batch)
    assert float(mean) == pytest.approx(labels.mean(), rel=1e-6)
    assert float(largest) == max(features.max().item() for features, _ in parity.input_fn(BATCH_SIZE))
    for case, metric in zip(METRICS, metrics, strict=True):
        assert metric.num_updates == STEPS
        assert float(metric) == pytest.approx(case.figure(labels, predictions, None), rel=1e-6), case
    for name in ("AUCMetric", "PrecisionAtKMetric", "RecallAtKMetric"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(cstorch.metrics, name)(2)
