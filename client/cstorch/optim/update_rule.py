"""The step of most optimizers: one update rule for every parameter."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from cstorch.optim.optimizer import Optimizer, dense_gradient, is_zero


class UpdateRule(Optimizer):
    """An optimizer that updates each parameter that has a gradient by itself."""

    @abstractmethod
    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one parameter and its state, in place."""

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
                    self.update(group, parameter, gradient)
        return loss

    def make_zeros(self, *names: str) -> None:
        """Make state tensors of these names for every parameter, like it and zero."""
        for parameter in self.parameters():
            for name in names:
                self.state[parameter][name] = torch.zeros_like(parameter)


def regularised(group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`g + weight_decay * p`, with g negated first where the group is to be maximised."""
    if group.get("maximize", False):
        gradient = -gradient
    return gradient if is_zero(group["weight_decay"]) else gradient + group["weight_decay"] * parameter
