"""Optimizers that update each parameter by itself."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from cstorch.optim.optimizer import Optimizer, dense_gradient


class UpdateRule(Optimizer):
    """`p -= lr * direction`, for every parameter that has a gradient."""

    @abstractmethod
    def direction(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Where to go from one parameter; updates the parameter's state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = dense_gradient(parameter)
                if gradient is not None:
                    parameter.sub_(group["lr"] * self.direction(group, parameter, gradient))
        return loss
