"""The share of predictions that are right."""

import warnings

import torch

from cstorch.metrics.metric import Metric


class AccuracyMetric(Metric):
    """Correct predictions divided by predictions.

    With weights, correct ones count their weight, and predictions of weight above 0 are counted.
    State: `total_correct_predictions`, `total_num_tokens`, float32, rank 0.
    """

    total_correct_predictions: torch.Tensor
    total_num_tokens: torch.Tensor

    def reset(self) -> None:
        """Forget all batches."""
        self.register_state("total_correct_predictions", torch.tensor(0, dtype=torch.float32))
        self.register_state("total_num_tokens", torch.tensor(0, dtype=torch.float32))

    def update(
        self,
        labels: torch.Tensor,
        predictions: torch.Tensor,
        weights: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take in one batch.

        labels, predictions: class numbers, of one shape. weights: of that shape too. dtype: what is summed in
        (float32).
        """
        if labels.shape != predictions.shape:
            warnings.warn(
                f"labels have shape {tuple(labels.shape)} and predictions {tuple(predictions.shape)}; "
                "the predictions are reshaped to the labels' shape",
                stacklevel=2,
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
