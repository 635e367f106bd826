"""Adamax: Adam with the largest gradient so far in place of their mean square."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_betas, check_not_negative, regularised, scalar_state


class Adamax(UpdateRule):
    """Adamax: Adam with the largest gradient so far in place of the mean square. As torch has it.

    For a parameter p with the gradient g, in update t (from 1)::

        m = betas[0] * m + (1 - betas[0]) * g
        s = max(betas[1] * s, |g| + eps)
        p = p - lr / (1 - betas[0]^t) * m / s

    State: `exp_avg` (m), `exp_inf` (s) and `beta1_power` (rank 0).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        betas: The decays of m and s, each at least 0 and less than 1.
        eps: The term that keeps the divisor from zero, not negative.
        weight_decay: The L2 penalty: `weight_decay * p` is added to g. Not negative.
        maximize: Whether to maximize the loss: g is negated.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def preinitialize(self) -> None:
        """Makes the moments and the power of beta1."""
        self.make_zeros("exp_avg", "exp_inf")
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["beta1_power"] = scalar_state(parameter, group["betas"][0])

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the moments."""
        return ["exp_avg", "exp_inf"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = regularised(group, parameter, gradient)
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        mean, largest, beta1_power = state["exp_avg"], state["exp_inf"], state["beta1_power"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        largest.copy_(torch.maximum(largest * beta2, gradient.abs() + group["eps"]))
        rate = group["lr"] / (1 - beta1_power)
        beta1_power.mul_(beta1)
        parameter.sub_(rate * (mean / largest))
