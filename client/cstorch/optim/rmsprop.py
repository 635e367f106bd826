"""RMSprop: gradients over the root of their mean square."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative, regularised


class RMSprop(UpdateRule):
    """RMSprop: gradients divided by the root of their mean square. As torch has it.

    For a parameter p with the gradient g::

        v = alpha * v + (1 - alpha) * g^2
        u = g / (sqrt(v) + eps)
        p = p - lr * u

    With momentum, `b = momentum * b + u` takes the place of u. With centered, `v - a^2` takes the place of v in the
    second
    line, where `a = alpha * a + (1 - alpha) * g`. State: `square_avg` (v), `momentum_buffer` (b) with momentum,
    `grad_avg`
    (a) with centered.

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        alpha: The decay of v and a, not negative.
        eps: The term that keeps the divisor from zero, not negative.
        weight_decay: The L2 penalty: `weight_decay * p` is added to g. Not negative.
        momentum: The decay of b; 0: no momentum.
        centered: Whether the variance of g takes the place of its mean square.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
    ) -> None:
        check_not_negative(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "centered": centered,
        }
        super().__init__(params, defaults)

    def preinitialize(self) -> None:
        """Makes the means and the momentum that the groups have."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["square_avg"] = torch.zeros_like(parameter)
                if group["momentum"] != 0:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                if group["centered"]:
                    state["grad_avg"] = torch.zeros_like(parameter)

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the means and the momentum."""
        return ["square_avg", "momentum_buffer", "grad_avg"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = regularised(group, parameter, gradient)
        alpha = group["alpha"]
        state = self.state[parameter]
        squares: torch.Tensor = state["square_avg"]
        squares.mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
        if group["centered"]:
            mean: torch.Tensor = state["grad_avg"]
            mean.lerp_(gradient, 1 - alpha)
            root = (squares - mean * mean).sqrt()
        else:
            root = squares.sqrt()
        direction = gradient / (root + group["eps"])
        if group["momentum"] != 0:
            buffer: torch.Tensor = state["momentum_buffer"]
            direction = buffer.mul_(group["momentum"]).add_(direction)
        parameter.sub_(group["lr"] * direction)
