"""The harmonic mean of precision and recall."""

from collections.abc import Sequence

import torch

from cstorch.metrics.confusion import ConfusionMatrixMetric, mean_where_counted, quotient


class FBetaScoreMetric(ConfusionMatrixMetric):
    """`(1 + beta^2) * right / (beta^2 * labels + predictions)`, of what belongs to a class.

    average_type: "micro", of the sums over all classes, or "macro", the mean over the classes that are a label or a
    prediction somewhere. ignore_labels: classes that are left out. Both are scikit-learn's fbeta_score.
    State: `confusion_matrix`, float32, [label, prediction].
    """

    def __init__(
        self,
        num_classes: int,
        beta: float = 1.0,
        average_type: str = "micro",
        ignore_labels: Sequence[int] | None = None,
        name: str | None = None,
    ) -> None:
        if beta <= 0:
            raise ValueError(f"beta must be positive, not {beta}")
        if average_type not in ("micro", "macro"):
            raise ValueError(f"average_type must be 'micro' or 'macro', not {average_type!r}")
        self._weight = beta * beta
        self._average_type = average_type
        super().__init__(num_classes, ignore_labels, name)

    def update(  # type: ignore[override]  # no weights, as in the original
        self, labels: torch.Tensor, predictions: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        """Take in one batch: class numbers of one shape. dtype: what is counted in (float32)."""
        super().update(labels, predictions, dtype=dtype)

    def compute(self) -> torch.Tensor:
        """The score over all batches so far (float32, rank 0)."""
        right, labels, predictions = self._counts()
        numerators = (1 + self._weight) * right
        denominators = self._weight * labels + predictions
        if self._average_type == "micro":
            return quotient(numerators.sum(), denominators.sum())
        return mean_where_counted(numerators, denominators)
