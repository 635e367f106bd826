"""ASGD: averaged stochastic gradient descent."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative, regularised, scalar_state


class ASGD(UpdateRule):
    """Averaged stochastic gradient descent. As torch has it.

    For a parameter p with the gradient g, in update t (from 1)::

        p = (1 - lambd * eta) * p - eta * g
        ax = ax + mu * (p - ax)
        eta = lr / (1 + lambd * lr * t)^alpha
        mu = 1 / max(1, t - t0)

    State: `ax` (the average of p), and of rank 0 `eta` (at first the lr of the constructor), `mu` (at first 1) and
    `step`
    (t).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        lambd: The decay of p and of eta.
        alpha: The exponent of the decay of eta.
        t0: The update at which the averaging begins.
        weight_decay: The L2 penalty: `weight_decay * p` is added to g. Not negative.
        maximize: Whether to maximize the loss: g is negated.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        maximize: bool = False,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        defaults = {
            "lr": lr,
            "lambd": lambd,
            "alpha": alpha,
            "t0": t0,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, enable_global_step=True)

    def preinitialize(self) -> None:
        """Makes the average and the rates."""
        self.make_zeros("ax")
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["eta"] = scalar_state(parameter, float(group["lr"]))
                self.state[parameter]["mu"] = scalar_state(parameter, 1.0)

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the average."""
        return ["ax"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = regularised(group, parameter, gradient)
        state = self.state[parameter]
        average, eta, mu = state["ax"], state["eta"], state["mu"]
        parameter.sub_(eta * (group["lambd"] * parameter + gradient))
        average.add_(mu * (parameter - average))
        step = self.increment_global_step(parameter)
        eta.copy_(group["lr"] / (1 + group["lambd"] * group["lr"] * step) ** group["alpha"])
        mu.copy_(1 / (step - group["t0"]).clamp(min=1))
