"""NAdam: Adam with Nesterov's momentum."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_betas, check_not_negative, regularised, scalar_state


class NAdam(UpdateRule):
    """Adam with Nesterov's momentum. As torch has it.

    For a parameter p with the gradient g, in update t (from 1)::

        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g^2
        mu_t = betas[0] * (1 - 0.96^(t * momentum_decay) / 2)
        d = sqrt(v / (1 - betas[1]^t)) + eps
        p = p - lr * g * (1 - mu_t) / (1 - mu_1 ... mu_t) / d - lr * m * mu_(t+1) / (1 - mu_1 ... mu_(t+1)) / d

    State: `exp_avg` (m), `exp_avg_sq` (v), and of rank 0 `mu_product` (mu_1 ... mu_t) and `step` (t).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        betas: The decays of m and v, each at least 0 and less than 1.
        eps: The term that keeps the divisor from zero, not negative.
        weight_decay: The L2 penalty: `weight_decay * p` is added to g. Not negative.
        momentum_decay: The decay of the correction of mu, not negative.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
        check_betas(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "momentum_decay": momentum_decay,
        }
        super().__init__(params, defaults, enable_global_step=True)

    def preinitialize(self) -> None:
        """Makes the moments and the product of the momenta."""
        self.make_zeros("exp_avg", "exp_avg_sq")
        for parameter in self.parameters():
            self.state[parameter]["mu_product"] = scalar_state(parameter, 1.0)

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the moments."""
        return ["exp_avg", "exp_avg_sq"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = regularised(group, parameter, gradient)
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        first, second, mu_product = state["exp_avg"], state["exp_avg_sq"], state["mu_product"]
        step = self.increment_global_step(parameter).double()
        mu, mu_next = (
            beta1 * (1 - 0.5 * torch.pow(0.96, count * group["momentum_decay"])) for count in (step, step + 1)
        )
        mu_product.mul_(mu)
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - torch.pow(beta2, step))).sqrt() + group["eps"]
        gradient_rate = group["lr"] * (1 - mu) / (1 - mu_product)
        momentum_rate = group["lr"] * mu_next / (1 - mu_product * mu_next)
        parameter.sub_((gradient_rate * gradient + momentum_rate * first) / root)
