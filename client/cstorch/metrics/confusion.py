"""The base class of metrics that are computed from a confusion matrix."""

from collections.abc import Sequence

import torch

from cstorch.metrics.metric import Metric


class ConfusionMatrixMetric(Metric):
    """Counts how often each class was predicted for each class.

    State: `confusion_matrix`, float32, [label, prediction]. What has another label than 0 to num_classes - 1 does not
    count.
    """

    confusion_matrix: torch.Tensor

    def __init__(self, num_classes: int, ignored: Sequence[int] | None, name: str | None) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, not {num_classes}")
        self._num_classes = num_classes
        self._ignored = tuple(ignored or ())
        super().__init__(name)

    def reset(self) -> None:
        """Forget all batches."""
        shape = (self._num_classes, self._num_classes)
        self.register_state("confusion_matrix", torch.zeros(shape, dtype=torch.float32, device="cpu"))

    def update(
        self,
        labels: torch.Tensor,
        predictions: torch.Tensor,
        weights: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take in one batch.

        labels, predictions: class numbers, of one shape. weights: of that shape too; what each of them counts.
        dtype: what is counted in (float32).
        """
        dtype = dtype or torch.float32
        actual = self._one_hot(labels, dtype)
        if weights is not None:
            actual = actual * weights.reshape(-1, 1).to(dtype)
        self.confusion_matrix.add_(actual.T @ self._one_hot(predictions, dtype))

    def _one_hot(self, classes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (classes.reshape(-1, 1) == self._classes()).to(dtype)

    def _classes(self) -> torch.Tensor:
        return torch.arange(self._num_classes, device=self.confusion_matrix.device)

    def _counts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each class how often it was predicted rightly, was the label, was predicted; 0 for ignored classes."""
        matrix, classes = self.confusion_matrix, self._classes()
        kept = torch.ones_like(matrix[0])
        for ignored in self._ignored:
            kept = kept * (classes != ignored).to(kept.dtype)
        right = (matrix * (classes.reshape(-1, 1) == classes).to(matrix.dtype)).sum(0)
        return right * kept, matrix.sum(1) * kept, matrix.sum(0) * kept


def quotient(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """The quotient, and 0 where the denominator is."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)


def mean_where_counted(numerators: torch.Tensor, denominators: torch.Tensor) -> torch.Tensor:
    """The mean of the quotients whose denominators are not 0; 0 if there is none."""
    counted = (denominators > 0).to(numerators.dtype)
    return quotient(quotient(numerators, denominators).sum(), counted.sum())
