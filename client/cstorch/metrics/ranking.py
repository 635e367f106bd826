"""Metrics that rank scores: precision and recall at k, and the area under a curve. On the CPU only."""

from collections.abc import Sequence

import torch

from cstorch.metrics.confusion import quotient
from cstorch.metrics.metric import Metric, not_on_csx

# --- How many of the k classes of the highest scores are right --------------------------------------------------------


class _AtKMetric(Metric):
    """The base class of metrics of the k best scored classes.

    Args:
        k: The number of classes, at least 1.
        name: The name of the metric; None: that of the class.
    """

    hits: torch.Tensor
    total: torch.Tensor

    def __init__(self, k: int, name: str | None = None) -> None:
        not_on_csx(self)
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        self._k = k
        super().__init__(name)

    def reset(self) -> None:
        """Sets the state to that of no batches."""
        self.register_state("hits", torch.tensor(0, dtype=torch.float32))
        self.register_state("total", torch.tensor(0, dtype=torch.float32))

    def update(self, labels: torch.Tensor, predictions: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Adds one batch.

        Args:
            labels: The right class of each row, [rows], or its right classes, [rows, labels].
            predictions: Scores, [rows, classes].
            weights: What each row counts, [rows]; None: 1.
        """
        labels = labels.reshape(labels.shape[0], -1, 1)
        best = predictions.topk(self._k, dim=-1).indices.unsqueeze(1)
        hits = (labels == best).sum((1, 2)).to(torch.float32)
        weights = torch.ones_like(hits) if weights is None else weights.to(torch.float32)
        self.hits.add_((hits * weights).sum())
        self.total.add_(weights.sum() * self._of_a_row(labels.shape[1]))

    def _of_a_row(self, num_labels: int) -> int:
        """Returns the greatest number of hits of a row."""
        raise NotImplementedError

    def compute(self) -> torch.Tensor:
        """The share over all batches so far (float32, rank 0)."""
        return quotient(self.hits, self.total)


class PrecisionAtKMetric(_AtKMetric):
    """The share of the k best scored classes that are right. On the CPU only.

    Args:
        k: The number of classes, at least 1.
        name: The name of the metric; None: that of the class.

    Raises:
        NotImplementedError: The backend is CSX.
        ValueError: `k` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """

    def _of_a_row(self, num_labels: int) -> int:
        return self._k


class RecallAtKMetric(_AtKMetric):
    """The share of the right classes that are among the k best scored. On the CPU only.

    Args:
        k: The number of classes, at least 1.
        name: The name of the metric; None: that of the class.

    Raises:
        NotImplementedError: The backend is CSX.
        ValueError: `k` is less than 1.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """

    def _of_a_row(self, num_labels: int) -> int:
        return num_labels


# --- The area under a curve over all thresholds -----------------------------------------------------------------------


_MARGIN = 1e-7  # so that scores of exactly 0 and 1 lie between the thresholds


class AUCMetric(Metric):
    """The area under the curve of two rates at thresholds in [0, 1]. On the CPU only.

    State: `true_positives`, `false_positives`, `true_negatives` and `false_negatives`, float32, [thresholds].

    Args:
        num_thresholds: The number of evenly spaced thresholds, at least 2.
        curve: "ROC" (recall over the rate of false positives) or "PR" (precision over recall).
        name: The name of the metric; None: that of the class.
        summation_method: The height between two thresholds: "interpolation" (for PR: of the counts, see
            `interpolate_pr_auc`), "minoring" the lower, "majoring" the higher.
        thresholds: The thresholds between 0 and 1, in place of `num_thresholds`.

    Raises:
        NotImplementedError: The backend is CSX.
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """

    true_positives: torch.Tensor
    false_positives: torch.Tensor
    true_negatives: torch.Tensor
    false_negatives: torch.Tensor

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        name: str | None = None,
        summation_method: str = "interpolation",
        thresholds: Sequence[float] | None = None,
    ) -> None:
        not_on_csx(self)
        if curve not in ("ROC", "PR"):
            raise ValueError(f"curve must be 'ROC' or 'PR', not {curve!r}")
        if summation_method not in ("interpolation", "minoring", "majoring"):
            raise ValueError(
                f"summation_method must be 'interpolation', 'minoring' or 'majoring', not {summation_method!r}"
            )
        if thresholds is None:
            if num_thresholds < 2:
                raise ValueError(f"num_thresholds must be at least 2, not {num_thresholds}")
            thresholds = [i / (num_thresholds - 1) for i in range(1, num_thresholds - 1)]
        elif not all(0 <= threshold <= 1 for threshold in thresholds):
            raise ValueError("thresholds must be between 0 and 1")
        self._thresholds = (-_MARGIN, *sorted(thresholds), 1 + _MARGIN)
        self._curve = curve
        self._summation_method = summation_method
        super().__init__(name)

    def reset(self) -> None:
        """Sets the state to that of no batches."""
        for name in ("true_positives", "false_positives", "true_negatives", "false_negatives"):
            self.register_state(name, torch.zeros(len(self._thresholds), dtype=torch.float32))

    def update(self, labels: torch.Tensor, predictions: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Adds one batch.

        Args:
            labels: 0 or 1, of any shape.
            predictions: Scores in [0, 1], of the labels' shape.
            weights: What each counts, of the labels' shape; None: 1.
        """
        thresholds = torch.tensor(self._thresholds, dtype=torch.float32, device=predictions.device)
        positive = (predictions.reshape(1, -1) > thresholds.reshape(-1, 1)).to(torch.float32)
        is_true = (labels.reshape(1, -1) != 0).to(torch.float32)
        counts = torch.ones_like(is_true) if weights is None else weights.reshape(1, -1).to(torch.float32)
        self.true_positives.add_((positive * is_true * counts).sum(1))
        self.false_positives.add_((positive * (1 - is_true) * counts).sum(1))
        self.true_negatives.add_(((1 - positive) * (1 - is_true) * counts).sum(1))
        self.false_negatives.add_(((1 - positive) * is_true * counts).sum(1))

    def interpolate_pr_auc(self) -> torch.Tensor:
        """Returns the area under the PR curve with counts that are linear between two thresholds; precision is not.

        With `tp = slope * p + intercept`, p being all positives, it is the integral of `tp / p` over tp, for each
        interval, divided by the number of true labels.
        """
        positives = self.true_positives + self.false_positives
        high, low = positives[:-1], positives[1:]
        change = self.true_positives[:-1] - self.true_positives[1:]
        slope = quotient(change, high - low)
        intercept = self.true_positives[1:] - slope * low
        both = (high > 0) & (low > 0)
        logarithm = torch.where(both, torch.log(high / low), 0.0)
        areas = slope * (change + intercept * logarithm)
        return quotient(areas, (self.true_positives + self.false_negatives)[1:]).sum()

    def compute(self) -> torch.Tensor:
        """The area over all batches so far (float32, rank 0)."""
        recall = quotient(self.true_positives, self.true_positives + self.false_negatives)
        if self._curve == "ROC":
            x = quotient(self.false_positives, self.false_positives + self.true_negatives)
            y = recall
        elif self._summation_method == "interpolation":
            return self.interpolate_pr_auc()
        else:
            x, y = recall, quotient(self.true_positives, self.true_positives + self.false_positives)
        left, right = y[1:], y[:-1]
        match self._summation_method:
            case "minoring":
                heights = torch.minimum(left, right)
            case "majoring":
                heights = torch.maximum(left, right)
            case _:
                heights = (left + right) / 2
        return ((x[:-1] - x[1:]) * heights).sum()
