"""Scope: names a part of the step."""

import torch
from torch import nn

from cstorch.nn.functional import enter_scope, exit_scope


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
