"""The weighted mean of a value."""

import torch

from cstorch.metrics.metric import Metric


class MeanMetric(Metric):
    """Sum of `value * weight`, divided by the sum of the weights.

    State: `mean_value` (the first sum), `weight` (the second), float32, rank 0.
    """

    mean_value: torch.Tensor
    weight: torch.Tensor

    def reset(self) -> None:
        """Forget all batches."""
        self.register_state("mean_value", torch.tensor(0, dtype=torch.float32))
        self.register_state("weight", torch.tensor(0, dtype=torch.float32))

    def update(
        self,
        value: torch.Tensor | float,
        weight: torch.Tensor | float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take in one value, or each element of a tensor.

        weight: of the value, or of each element. dtype: what is summed in (float32).
        """
        if not isinstance(value, torch.Tensor):
            value = torch.full_like(self.mean_value, value)
        value = value.detach().to(dtype or torch.float32)
        self.mean_value.add_((value * weight).sum())
        self.weight.add_((torch.ones_like(value) * weight).sum())

    def compute(self) -> torch.Tensor:
        """The mean over all batches so far (float32, rank 0)."""
        return self.mean_value / self.weight
