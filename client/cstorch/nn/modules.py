"""Modules that annotate a model for the real system and change no number here: Scope and StripPadding."""

import torch
from torch import nn

from cstorch.nn.functional import enter_scope, exit_scope

# --- Scope: names a part of the step ----------------------------------------------------------------------------------


class Scope(nn.Module):
    """`x = scope(x)` begins a named part, `x = scope.exit(x)` ends it. It changes no number, and names nothing here."""

    def __init__(self, scope_name: str) -> None:
        super().__init__()
        self.scope_name = scope_name

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Begin the part; returns the input."""
        return enter_scope(input, self.scope_name)

    def exit(self, input: torch.Tensor) -> torch.Tensor:
        """End the part; returns the input."""
        return exit_scope(input, self.scope_name)


# --- Padding that need not be computed --------------------------------------------------------------------------------


class StripPadding(nn.Module):
    """Tells the real system which tokens of a batch are padding, so that it leaves them out. Here it changes nothing:
    padding is computed, and the masks of the model and of its loss keep it from mattering."""

    def forward(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The tensor. mask: which tokens are no padding."""
        return tensor
