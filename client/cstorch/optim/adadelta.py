"""Adadelta: updates as large as the latest ones were."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative, regularised


class Adadelta(UpdateRule):
    """Adadelta: each step is as large as the root mean square of the latest ones. As torch has it.

    For a parameter p with the gradient g::

        v = rho * v + (1 - rho) * g^2
        u = sqrt(a + eps) / sqrt(v + eps) * g
        a = rho * a + (1 - rho) * u^2
        p = p - lr * u

    State: `square_avg` (v) and `acc_delta` (a).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        rho: The decay of both means, from 0 to 1.
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
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        maximize: bool = False,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0 <= rho <= 1:
            raise ValueError(f"Invalid rho: {rho}. It must be at least 0 and at most 1")
        defaults = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    def preinitialize(self) -> None:
        """Makes both means."""
        self.make_zeros("square_avg", "acc_delta")

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of both means."""
        return ["square_avg", "acc_delta"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = regularised(group, parameter, gradient)
        rho, eps = group["rho"], group["eps"]
        squares, changes = self.state[parameter]["square_avg"], self.state[parameter]["acc_delta"]
        squares.mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
        change = (changes + eps).sqrt() / (squares + eps).sqrt() * gradient
        changes.mul_(rho).addcmul_(change, change, value=1 - rho)
        parameter.sub_(group["lr"] * change)
