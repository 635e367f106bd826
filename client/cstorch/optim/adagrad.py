"""Adagrad: a rate for each element that falls with the squares of its gradients."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative, regularised


class Adagrad(UpdateRule):
    """Adagrad: a rate of each element that falls with the sum of its squared gradients. As torch has it.

    For a parameter p with the gradient g, in update t (from 1)::

        s = s + g^2
        p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

    State: `sum` (s) and `step` (t, rank 0).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        lr_decay: The decay of the learning rate in each update, not negative.
        weight_decay: The L2 penalty: `weight_decay * p` is added to g. Not negative.
        initial_accumulator_value: s before the first update, not negative.
        eps: The term that keeps the divisor from zero, not negative.
        maximize: Whether to maximize the loss: g is negated.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-6,
        maximize: bool = False,
    ) -> None:
        check_not_negative(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        super().__init__(params, defaults, enable_global_step=True)

    def preinitialize(self) -> None:
        """Makes `sum`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.full_like(parameter, group["initial_accumulator_value"])

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the sum."""
        return ["sum"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = regularised(group, parameter, gradient)
        total: torch.Tensor = self.state[parameter]["sum"]
        total.addcmul_(gradient, gradient)
        step = self.increment_global_step(parameter)
        rate = group["lr"] / (1 + (step - 1) * group["lr_decay"])
        parameter.sub_(rate * (gradient / (total.sqrt() + group["eps"])))
