"""Perplexity on the CPU; on the cluster it is part of the text models' tests."""

import pytest
import torch
from torch.nn import functional as F

from cstorch.metrics import PerplexityMetric


def test_perplexity_over_batches() -> None:
    perplexity = PerplexityMetric("perplexity")
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 8, 5, generator=generator), torch.randint(0, 5, (3, 8), generator=generator)
    for batch in range(3):
        loss = F.cross_entropy(logits[batch], labels[batch], reduction="sum")
        so_far = perplexity(labels=labels[batch], loss=loss)
        expected = F.cross_entropy(logits[: batch + 1].flatten(0, 1), labels[: batch + 1].flatten()).exp()
        assert so_far.item() == pytest.approx(expected.item())
    perplexity.reset()
    assert perplexity.total_num_tokens == 0


def test_only_tokens_with_weight_count() -> None:
    perplexity = PerplexityMetric("weighted perplexity")
    perplexity(torch.tensor([1, 2, 3]), torch.tensor(2.0), weights=torch.tensor([1.0, 0.0, 0.5]))
    assert float(perplexity) == pytest.approx(torch.tensor(1.0).exp().item())
