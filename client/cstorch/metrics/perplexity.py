"""The exponential of the mean loss of a token."""

import torch

from cstorch.metrics.metric import Metric


class PerplexityMetric(Metric):
    """exp(sum of losses / number of tokens); with weights, tokens of weight above 0 are counted.

    State: `total_loss`, `total_num_tokens`, float32, rank 0.
    """

    total_loss: torch.Tensor
    total_num_tokens: torch.Tensor

    def reset(self) -> None:
        """Forget all batches."""
        self.register_state("total_loss", torch.tensor(0, dtype=torch.float32))
        self.register_state("total_num_tokens", torch.tensor(0, dtype=torch.float32))

    def update(
        self,
        labels: torch.Tensor,
        loss: torch.Tensor,
        weights: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take in one batch.

        labels: class numbers of the tokens. loss: the sum of the tokens' losses, of rank 0. weights: of the labels'
        shape. dtype: what the tokens are counted in (float32).
        """
        self.total_loss.add_(loss.detach().to(torch.float32))
        if weights is None:
            self.total_num_tokens.add_(float(labels.numel()))
        else:
            self.total_num_tokens.add_((weights > 0).to(dtype or torch.float32).sum())

    def compute(self) -> torch.Tensor:
        """The perplexity over all batches so far (float32, rank 0)."""
        return torch.exp(self.total_loss / self.total_num_tokens)
