"""Adamax: Adam with the largest gradient so far in place of their mean square."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_betas, check_not_negative, regularised, scalar_state


class Adamax(UpdateRule):
    """`m = beta1 * m + (1 - beta1) * g`, `s = max(beta2 * s, |g| + eps)`, `p -= lr / (1 - beta1^t) * m / s`; as torch.

    State: `exp_avg` (m), `exp_inf` (s), and `beta1_power`: beta1 to the power of the number of the next update, rank 0.
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
        """Make the moments and the power of beta1."""
        self.make_zeros("exp_avg", "exp_inf")
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["beta1_power"] = scalar_state(parameter, group["betas"][0])

    def state_names_to_sparsify(self) -> list[str]:
        """The moments."""
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
