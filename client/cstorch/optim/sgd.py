"""Stochastic gradient descent."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative, regularised


class SGD(UpdateRule):
    """Stochastic gradient descent, with or without momentum.

    For a parameter p with the gradient g: `p = p - lr * g`. With momentum::

        b = momentum * b + (1 - dampening) * g
        p = p - lr * (g + momentum * b if nesterov else b)

    b starts at zero, so dampening counts in the first update too; torch starts it at the first gradient. State:
    `momentum_buffer` (b) with momentum.

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative. It is needed.
        momentum: The decay of b, not negative; 0: no momentum.
        dampening: The share of g that is left out of b.
        weight_decay: The L2 penalty: `weight_decay * p` is added to g. Not negative.
        nesterov: Whether the step looks one momentum ahead.
        maximize: Whether to maximize the loss: g is negated.

    Raises:
        ValueError: A setting is out of range, or nesterov comes without momentum or with dampening.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def preinitialize(self) -> None:
        """Makes `momentum_buffer` for the parameters that have momentum."""
        for group in self.param_groups:
            if group["momentum"] == 0:
                continue
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the momentum."""
        return ["momentum_buffer"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = regularised(group, parameter, gradient)
        momentum = group["momentum"]
        if momentum != 0:
            buffer: torch.Tensor = self.state[parameter]["momentum_buffer"]
            buffer.mul_(momentum).add_(gradient, alpha=1 - group["dampening"])
            gradient = gradient + momentum * buffer if group["nesterov"] else buffer
        parameter.sub_(group["lr"] * gradient)
