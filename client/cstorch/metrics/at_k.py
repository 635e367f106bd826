"""How many of the k classes of the highest scores are right."""

import torch

from cstorch.metrics.confusion import quotient
from cstorch.metrics.metric import Metric, not_on_csx


class _AtKMetric(Metric):
    hits: torch.Tensor
    total: torch.Tensor

    def __init__(self, k: int, name: str | None = None) -> None:
        not_on_csx(self)
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        self._k = k
        super().__init__(name)

    def reset(self) -> None:
        """Forget all batches."""
        self.register_state("hits", torch.tensor(0, dtype=torch.float32))
        self.register_state("total", torch.tensor(0, dtype=torch.float32))

    def update(self, labels: torch.Tensor, predictions: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Take in one batch.

        labels: the right class of each row, [rows], or its right classes, [rows, labels]. predictions: scores, [rows,
        classes]. weights: what each row counts, [rows].
        """
        labels = labels.reshape(labels.shape[0], -1, 1)
        best = predictions.topk(self._k, dim=-1).indices.unsqueeze(1)
        hits = (labels == best).sum((1, 2)).to(torch.float32)
        weights = torch.ones_like(hits) if weights is None else weights.to(torch.float32)
        self.hits.add_((hits * weights).sum())
        self.total.add_(weights.sum() * self._of_a_row(labels.shape[1]))

    def _of_a_row(self, num_labels: int) -> int:
        """How many hits a row could have had."""
        raise NotImplementedError

    def compute(self) -> torch.Tensor:
        """The share over all batches so far (float32, rank 0)."""
        return quotient(self.hits, self.total)


class PrecisionAtKMetric(_AtKMetric):
    """The share of the k best scored classes that are right. Not on CSX: NotImplementedError."""

    def _of_a_row(self, num_labels: int) -> int:
        return self._k


class RecallAtKMetric(_AtKMetric):
    """The share of the right classes that are among the k best scored. Not on CSX: NotImplementedError."""

    def _of_a_row(self, num_labels: int) -> int:
        return num_labels
