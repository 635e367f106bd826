"""Metrics on the CPU."""

import pytest
import torch

from cstorch.metrics import AccuracyMetric, Metric, get_all_metrics


def test_accuracy_over_batches() -> None:
    accuracy = AccuracyMetric("accuracy")
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (4, 8), generator=generator)
    predictions = torch.randint(0, 3, (4, 8), generator=generator).int()
    for batch in range(4):
        so_far = accuracy(labels=labels[batch], predictions=predictions[batch])
        assert so_far.item() == pytest.approx((labels[: batch + 1] == predictions[: batch + 1]).double().mean().item())
    assert float(accuracy) == pytest.approx((labels == predictions).double().mean().item())
    assert accuracy.num_updates == 4
    assert accuracy.state_dict() == {}


def test_weights() -> None:
    accuracy = AccuracyMetric("weighted")
    accuracy(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 0]), weights=torch.tensor([1.0, 0.0, 1.0]))
    assert float(accuracy) == 0.5


def test_shapes_that_differ() -> None:
    accuracy = AccuracyMetric("shapes")
    with pytest.warns(UserWarning, match="reshaped"):
        accuracy(torch.tensor([[1], [2]]), torch.tensor([1, 2]))
    assert float(accuracy) == 1


def test_reset_keeps_the_state_tensors() -> None:
    accuracy = AccuracyMetric("reset")
    buffer = accuracy.total_num_tokens
    accuracy(torch.tensor([1]), torch.tensor([1]))
    accuracy.reset()
    assert accuracy.total_num_tokens is buffer
    assert buffer.item() == 0
    with pytest.raises(RuntimeError, match="'reset' has no value yet"):
        float(accuracy)


class Total(Metric):
    def reset(self) -> None:
        self.register_state("total", torch.tensor(0.0), persistent=True)

    def update(self, value: torch.Tensor) -> None:
        self.total: torch.Tensor
        self.total.add_(value.sum())

    def compute(self) -> torch.Tensor:
        return self.total.clone()


def test_custom_metric_and_registry() -> None:
    first, second, other = Total("total"), Total("total"), Total("other")
    first(torch.ones(3))
    second(torch.ones(2))
    assert (float(first), float(second)) == (3, 2)
    metrics = list(get_all_metrics())
    assert [name for name, _ in metrics] == ["total.0", "total.1", "other"]
    assert [metric for _, metric in metrics] == [first, second, other]
    assert list(first.state_dict()) == ["total"]
