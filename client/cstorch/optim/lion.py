"""Lion: the sign of a momentum."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_betas, check_not_negative, is_zero


class Lion(UpdateRule):
    """Lion: steps along the sign of a momentum. torch has none.

    For a parameter p with the gradient g::

        p = p - lr * (sign(betas[0] * m + (1 - betas[0]) * g) + weight_decay * p)
        m = betas[1] * m + (1 - betas[1]) * g

    State: `exp_avg` (m).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        betas: The weight of m in the step, and the decay of m; each at least 0 and less than 1.
        weight_decay: The decoupled weight decay, not negative.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def preinitialize(self) -> None:
        """Makes the momentum."""
        self.make_zeros("exp_avg")

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the momentum."""
        return ["exp_avg"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        beta1, beta2 = group["betas"]
        momentum: torch.Tensor = self.state[parameter]["exp_avg"]
        direction = torch.sign(momentum * beta1 + gradient * (1 - beta1))
        if not is_zero(group["weight_decay"]):
            direction = direction + group["weight_decay"] * parameter
        momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)
        parameter.sub_(group["lr"] * direction)
