"""How well two divisions into classes agree."""

from collections.abc import Sequence

import torch

from cstorch.metrics.confusion import ConfusionMatrixMetric, mean_where_counted


class MeanIOUMetric(ConfusionMatrixMetric):
    """Intersection over union, `right / (labels + predictions - right)`: the mean over the classes.

    Classes that are nowhere a label or a prediction, and ignore_classes, are left out of the mean; otherwise
    scikit-learn's jaccard_score. State: `confusion_matrix`, float32, [label, prediction].
    """

    def __init__(self, num_classes: int, ignore_classes: Sequence[int] | None = None, name: str | None = None) -> None:
        super().__init__(num_classes, ignore_classes, name)

    def compute(self) -> torch.Tensor:
        """The mean over all batches so far (float32, rank 0)."""
        right, labels, predictions = self._counts()
        return mean_where_counted(right, labels + predictions - right)


class DiceCoefficientMetric(ConfusionMatrixMetric):
    """`2 * right / (labels + predictions)`: the mean over the classes, as for MeanIOUMetric.

    It is scikit-learn's f1_score. State: `confusion_matrix`, float32, [label, prediction].
    """

    def __init__(self, num_classes: int, ignore_classes: Sequence[int] | None = None, name: str | None = None) -> None:
        super().__init__(num_classes, ignore_classes, name)

    def compute(self) -> torch.Tensor:
        """The mean over all batches so far (float32, rank 0)."""
        right, labels, predictions = self._counts()
        return mean_where_counted(2 * right, labels + predictions)


class MeanPerClassAccuracyMetric(ConfusionMatrixMetric):
    """`right / labels`: the mean over the classes that are a label somewhere; scikit-learn's balanced_accuracy_score.

    State: `confusion_matrix`, float32, [label, prediction].
    """

    def __init__(self, num_classes: int, name: str | None = None) -> None:
        super().__init__(num_classes, None, name)

    def compute(self) -> torch.Tensor:
        """The mean over all batches so far (float32, rank 0)."""
        right, labels, _ = self._counts()
        return mean_where_counted(right, labels)
