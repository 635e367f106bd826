"""RAdam: Adam whose adaptive rate waits until its variance is bounded."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_betas, check_not_negative, regularised


class RAdam(UpdateRule):
    """Adam whose adaptive rate begins once its variance is bounded. As torch has it.

    For a parameter p with the gradient g, in update t (from 1)::

        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g^2
        n = 2 / (1 - betas[1]) - 1
        r = n - 2 * t * betas[1]^t / (1 - betas[1]^t)
        s = sqrt((r - 4) * (r - 2) * n / ((n - 4) * (n - 2) * r)) * sqrt(1 - betas[1]^t) / (sqrt(v) + eps)
        p = p - lr * m / (1 - betas[0]^t) * (s if r > 5 else 1)

    State: `exp_avg` (m), `exp_avg_sq` (v) and `step` (t, rank 0).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        betas: The decays of m and v, each at least 0 and less than 1.
        eps: The term that keeps the divisor from zero, not negative.
        weight_decay: The L2 penalty: `weight_decay * p` is added to g. Not negative.

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
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, enable_global_step=True)

    def preinitialize(self) -> None:
        """Makes the moments."""
        self.make_zeros("exp_avg", "exp_avg_sq")

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the moments."""
        return ["exp_avg", "exp_avg_sq"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = regularised(group, parameter, gradient)
        beta1, beta2 = group["betas"]
        first, second = self.state[parameter]["exp_avg"], self.state[parameter]["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # r is a small difference of large numbers: float32 would leave three digits of it.
        step = self.increment_global_step(parameter).double()
        beta2_power = torch.pow(beta2, step)
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2_power / (1 - beta2_power)
        scale = longest / ((longest - 4) * (longest - 2))
        # Where the rectifier is not used, the clamp keeps the root from a negative number.
        bounded = length.clamp(min=5)
        rectifier = ((bounded - 4) * (bounded - 2) / bounded * scale * (1 - beta2_power)).sqrt()
        adaptive = rectifier.to(second.dtype) / (second.sqrt() + group["eps"])
        rate = group["lr"] / (1 - torch.pow(beta1, step))
        parameter.sub_(rate * first * torch.where(length > 5, adaptive, 1.0))
