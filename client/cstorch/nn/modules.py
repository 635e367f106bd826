"""Modules that annotate a model for the real system and change no number here: Scope and StripPadding."""

import torch
from torch import nn

from cstorch.nn.functional import enter_scope, exit_scope

# --- Scope: names a part of the step ----------------------------------------------------------------------------------


class Scope(nn.Module):
    """A named part of the step: `x = scope(x)` begins it, `x = scope.exit(x)` ends it. It changes nothing here.

    Args:
        scope_name: The name.

    Reference: release 2.10, `cerebras.pytorch.nn`.
    """

    def __init__(self, scope_name: str) -> None:
        super().__init__()
        self.scope_name = scope_name

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Begins the part; returns the input.

        Args:
            input: The tensor.
        """
        return enter_scope(input, self.scope_name)

    def exit(self, input: torch.Tensor) -> torch.Tensor:
        """Ends the part; returns the input.

        Args:
            input: The tensor.
        """
        return exit_scope(input, self.scope_name)


# --- Padding that need not be computed --------------------------------------------------------------------------------


class StripPadding(nn.Module):
    """A mark of the tokens that are padding, which the real system leaves out. It changes nothing here.

    Padding is computed, and the masks of the model and of its loss keep it from mattering.

    Reference: releases 2.0 and 2.1, `cerebras_pytorch.nn`.
    """

    def forward(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the tensor.

        Args:
            tensor: The tokens.
            mask: Whether each token is no padding.
        """
        return tensor
