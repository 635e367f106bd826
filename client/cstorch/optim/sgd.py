"""Stochastic gradient descent."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative, regularised


class SGD(UpdateRule):
    """`p -= lr * g`, with momentum `p -= lr * buf` where `buf = momentum * buf + (1 - dampening) * g`.

    The buffer starts at zero, so dampening counts on the first step too (torch starts it at the first gradient).
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
        """Make `momentum_buffer` for the parameters that have momentum."""
        for group in self.param_groups:
            if group["momentum"] == 0:
                continue
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def state_names_to_sparsify(self) -> list[str]:
        """The momentum."""
        return ["momentum_buffer"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = regularised(group, parameter, gradient)
        momentum = group["momentum"]
        if momentum != 0:
            buffer: torch.Tensor = self.state[parameter]["momentum_buffer"]
            buffer.mul_(momentum).add_(gradient, alpha=1 - group["dampening"])
            gradient = gradient + momentum * buffer if group["nesterov"] else buffer
        parameter.sub_(group["lr"] * gradient)
