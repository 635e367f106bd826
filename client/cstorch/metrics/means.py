"""Metrics that are means: of values, of right predictions (accuracy), of the loss of a token (perplexity)."""

import torch

from cstorch._internal.tracing.provenance import warn_user
from cstorch.metrics.metric import Metric

# --- The weighted mean of a value -------------------------------------------------------------------------------------


class MeanMetric(Metric):
    """The weighted mean: the sum of `value * weight`, divided by the sum of the weights.

    State: `mean_value` (the first sum) and `weight` (the second), float32, rank 0.

    Args:
        name: The name of the metric; None: that of the class.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """

    mean_value: torch.Tensor
    weight: torch.Tensor

    def reset(self) -> None:
        """Sets the state to that of no batches."""
        self.register_state("mean_value", torch.tensor(0, dtype=torch.float32))
        self.register_state("weight", torch.tensor(0, dtype=torch.float32))

    def update(
        self,
        value: torch.Tensor | float,
        weight: torch.Tensor | float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Adds one value, or each element of a tensor.

        Args:
            value: The value, or a tensor of values.
            weight: The weight of the value, or of each element.
            dtype: The type to sum in; None: float32.
        """
        if not isinstance(value, torch.Tensor):
            value = torch.full_like(self.mean_value, value)
        value = value.detach().to(dtype or torch.float32)
        self.mean_value.add_((value * weight).sum())
        self.weight.add_((torch.ones_like(value) * weight).sum())

    def compute(self) -> torch.Tensor:
        """The mean over all batches so far (float32, rank 0)."""
        return self.mean_value / self.weight


# --- The share of predictions that are right --------------------------------------------------------------------------


class AccuracyMetric(Metric):
    """The number of correct predictions divided by the number of predictions.

    With weights, correct predictions count their weight, and the predictions of weight above 0 are counted. State:
    `total_correct_predictions` and `total_num_tokens`, float32, rank 0.

    Args:
        name: The name of the metric; None: that of the class.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """

    total_correct_predictions: torch.Tensor
    total_num_tokens: torch.Tensor

    def reset(self) -> None:
        """Sets the state to that of no batches."""
        self.register_state("total_correct_predictions", torch.tensor(0, dtype=torch.float32))
        self.register_state("total_num_tokens", torch.tensor(0, dtype=torch.float32))

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
            predictions: Class numbers, of the labels' shape; other shapes are reshaped, with a warning.
            weights: The weight of each prediction, of the labels' shape; None: 1.
            dtype: The type to sum in; None: float32.
        """
        if labels.shape != predictions.shape:
            warn_user(
                f"labels have shape {tuple(labels.shape)} and predictions {tuple(predictions.shape)}; "
                "the predictions are reshaped to the labels' shape"
            )
            predictions = predictions.reshape(labels.shape)
        dtype = dtype or torch.float32
        correct = (labels == predictions).to(dtype)
        if weights is None:
            self.total_correct_predictions.add_(correct.sum())
            self.total_num_tokens.add_(float(labels.numel()))
        else:
            self.total_correct_predictions.add_((correct * weights.to(dtype)).sum())
            self.total_num_tokens.add_((weights > 0).to(dtype).sum())

    def compute(self) -> torch.Tensor:
        """The accuracy over all batches so far (float32, rank 0)."""
        return self.total_correct_predictions / self.total_num_tokens


# --- The exponential of the mean loss of a token ----------------------------------------------------------------------


class PerplexityMetric(Metric):
    """The perplexity: exp(sum of losses / number of tokens).

    With weights, the tokens of weight above 0 are counted. State: `total_loss` and `total_num_tokens`, float32, rank 0.

    Args:
        name: The name of the metric; None: that of the class.

    Reference: release 2.10, `cerebras.pytorch.metrics`.
    """

    total_loss: torch.Tensor
    total_num_tokens: torch.Tensor

    def reset(self) -> None:
        """Sets the state to that of no batches."""
        self.register_state("total_loss", torch.tensor(0, dtype=torch.float32))
        self.register_state("total_num_tokens", torch.tensor(0, dtype=torch.float32))

    def update(
        self,
        labels: torch.Tensor,
        loss: torch.Tensor,
        weights: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Adds one batch.

        Args:
            labels: Class numbers of the tokens, of any shape.
            loss: The sum of the tokens' losses, of rank 0.
            weights: The weight of each token, of the labels' shape; None: 1.
            dtype: The type to count tokens in; None: float32.
        """
        self.total_loss.add_(loss.detach().to(torch.float32))
        if weights is None:
            self.total_num_tokens.add_(float(labels.numel()))
        else:
            self.total_num_tokens.add_((weights > 0).to(dtype or torch.float32).sum())

    def compute(self) -> torch.Tensor:
        """The perplexity over all batches so far (float32, rank 0)."""
        return torch.exp(self.total_loss / self.total_num_tokens)
