"""Lamb: Adam with a rate for each parameter tensor."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_betas, check_not_negative, is_zero

LARGEST_NORM = 10.0


class Lamb(UpdateRule):
    """Lamb: Adam with a rate for each parameter tensor. torch has none.

    For a parameter p with the gradient g::

        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g^2
        u = m / (sqrt(v) + eps) + weight_decay * p
        p = p - lr * min(norm(p), 10) / norm(u) * u

    There is no bias correction. The quotient is 1 where a norm is 0, and with adam always. State: `exp_avg` (m) and
    `exp_avg_sq` (v).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        betas: The decays of m and v, each at least 0 and less than 1.
        eps: The term that keeps the divisor from zero, not negative.
        weight_decay: The decoupled weight decay, not negative.
        adam: Whether the quotient of the norms is left out.

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
        weight_decay: float = 0,
        adam: bool = False,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam": adam}
        super().__init__(params, defaults)

    def preinitialize(self) -> None:
        """Makes the moments."""
        self.make_zeros("exp_avg", "exp_avg_sq")

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the moments."""
        return ["exp_avg", "exp_avg_sq"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        beta1, beta2 = group["betas"]
        first, second = self.state[parameter]["exp_avg"], self.state[parameter]["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        direction = first / (second.sqrt() + group["eps"])
        if not is_zero(group["weight_decay"]):
            direction = direction + group["weight_decay"] * parameter
        rate = group["lr"]
        if not group["adam"]:
            own_norm = torch.linalg.vector_norm(parameter).clamp(max=LARGEST_NORM)
            norm = torch.linalg.vector_norm(direction)
            rate = rate * torch.where((own_norm > 0) & (norm > 0), own_norm / norm, 1.0)
        parameter.sub_(rate * direction)
