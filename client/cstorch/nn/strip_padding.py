"""Padding that need not be computed."""

import torch
from torch import nn


class StripPadding(nn.Module):
    """Tells the real system which tokens of a batch are padding, so that it leaves them out. Here it changes nothing:
    padding is computed, and the masks of the model and of its loss keep it from mattering."""

    def forward(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The tensor. mask: which tokens are no padding."""
        return tensor
