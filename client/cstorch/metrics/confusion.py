"""Metrics that are computed from a confusion matrix: F beta, intersection over union, Dice, accuracy per class."""

from collections.abc import Sequence

import torch

from cstorch.metrics.metric import Metric

# --- The base class of metrics that are computed from a confusion matrix ----------------------------------------------


class ConfusionMatrixMetric(Metric):
    """The base class of metrics that count how often each class was predicted for each class.

    State: `confusion_matrix`, float32, [label, prediction]. Labels outside 0 to num_classes - 1 do not count.

    Args:
        num_classes: The number of classes, at least 1.
        ignored: Classes that are left out; None: none.
        name: The name of the metric; None: that of the class.

    Raises:
        ValueError: `num_classes` is less than 1.
        TypeError: What is left out are no class numbers.
    """

    confusion_matrix: torch.Tensor

    def __init__(self, num_classes: int, ignored: Sequence[int] | None, name: str | None) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, not {num_classes}")
        if isinstance(ignored, str) or not all(isinstance(each, int) for each in ignored or ()):
            raise TypeError(
                f"the classes that are left out are a list of numbers, not {ignored!r}; a name is the keyword `name`"
            )
        self._num_classes = num_classes
        self._ignored = tuple(ignored or ())
        super().__init__(name)

    def reset(self) -> None:
        """Sets the state to that of no batches."""
        shape = (self._num_classes, self._num_classes)
        self.register_state("confusion_matrix", torch.zeros(shape, dtype=torch.float32, device="cpu"))

    def update(
        self,
        labels: torch.Tensor,
        predictions: torch.Tensor,
        weights: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Adds one batch.

        Args:
            labels: Class numbers, of any shape.
            predictions: Class numbers, of the labels' shape.
            weights: What each prediction counts, of the labels' shape; None: 1.
            dtype: The type to count in; None: float32.
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
        """Returns how often each class was predicted rightly, was the label, was predicted; 0 for ignored classes."""
        matrix, classes = self.confusion_matrix, self._classes()
        kept = torch.ones_like(matrix[0])
        for ignored in self._ignored:
            kept = kept * (classes != ignored).to(kept.dtype)
        right = (matrix * (classes.reshape(-1, 1) == classes).to(matrix.dtype)).sum(0)
        return right * kept, matrix.sum(1) * kept, matrix.sum(0) * kept


def quotient(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Returns the quotient, and 0 where the denominator is 0; NaN where one of both is NaN."""
    return torch.where(denominator == 0, numerator * 0, numerator / denominator)


def mean_where_counted(numerators: torch.Tensor, denominators: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the quotients whose denominators are not 0; 0 if there is none."""
    counted = (denominators != 0).to(numerators.dtype)
    return quotient(quotient(numerators, denominators).sum(), counted.sum())


# --- The harmonic mean of precision and recall ------------------------------------------------------------------------


class FBetaScoreMetric(ConfusionMatrixMetric):
    """The F score: `(1 + beta^2) * right / (beta^2 * labels + predictions)` of a class, as scikit-learn's fbeta_score.

    State: `confusion_matrix`, float32, [label, prediction].

    Args:
        num_classes: The number of classes, at least 1.
        beta: The weight of recall over precision, positive.
        average_type: "micro": of the sums over all classes; "macro": the mean over the classes that are a label or a
            prediction.
        ignore_labels: Classes that are left out; None: none.
        name: The name of the metric; None: that of the class.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
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
        """Adds one batch.

        Args:
            labels: Class numbers, of any shape.
            predictions: Class numbers, of the labels' shape.
            dtype: The type to count in; None: float32.
        """
        super().update(labels, predictions, dtype=dtype)

    def compute(self) -> torch.Tensor:
        """The score over all batches so far (float32, rank 0)."""
        right, labels, predictions = self._counts()
        numerators = (1 + self._weight) * right
        denominators = self._weight * labels + predictions
        if self._average_type == "micro":
            return quotient(numerators.sum(), denominators.sum())
        return mean_where_counted(numerators, denominators)


# --- How well two divisions into classes agree ------------------------------------------------------------------------


class MeanIOUMetric(ConfusionMatrixMetric):
    """The mean over the classes of intersection over union: `right / (labels + predictions - right)`.

    Classes that are neither a label nor a prediction are left out of the mean; otherwise it is scikit-learn's
    jaccard_score. State: `confusion_matrix`, float32, [label, prediction].

    Args:
        num_classes: The number of classes, at least 1.
        ignore_classes: Classes that are left out; None: none.
        name: The name of the metric; None: that of the class.

    Raises:
        ValueError: `num_classes` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """

    def __init__(self, num_classes: int, ignore_classes: Sequence[int] | None = None, name: str | None = None) -> None:
        super().__init__(num_classes, ignore_classes, name)

    def compute(self) -> torch.Tensor:
        """The mean over all batches so far (float32, rank 0)."""
        right, labels, predictions = self._counts()
        return mean_where_counted(right, labels + predictions - right)


class DiceCoefficientMetric(ConfusionMatrixMetric):
    """The mean over the classes of `2 * right / (labels + predictions)`, as scikit-learn's f1_score.

    Classes that are neither a label nor a prediction are left out of the mean. State: `confusion_matrix`, float32,
    [label, prediction].

    Args:
        num_classes: The number of classes, at least 1.
        ignore_classes: Classes that are left out; None: none.
        name: The name of the metric; None: that of the class.

    Raises:
        ValueError: `num_classes` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """

    def __init__(self, num_classes: int, ignore_classes: Sequence[int] | None = None, name: str | None = None) -> None:
        super().__init__(num_classes, ignore_classes, name)

    def compute(self) -> torch.Tensor:
        """The mean over all batches so far (float32, rank 0)."""
        right, labels, predictions = self._counts()
        return mean_where_counted(2 * right, labels + predictions)


class MeanPerClassAccuracyMetric(ConfusionMatrixMetric):
    """The mean over the classes of `right / labels`, as scikit-learn's balanced_accuracy_score.

    Classes that are no label are left out of the mean. State: `confusion_matrix`, float32, [label, prediction].

    Args:
        num_classes: The number of classes, at least 1.
        name: The name of the metric; None: that of the class.

    Raises:
        ValueError: `num_classes` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """

    def __init__(self, num_classes: int, name: str | None = None) -> None:
        super().__init__(num_classes, None, name)

    def compute(self) -> torch.Tensor:
        """The mean over all batches so far (float32, rank 0)."""
        right, labels, _ = self._counts()
        return mean_where_counted(right, labels)
