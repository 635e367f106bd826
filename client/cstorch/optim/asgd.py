"""ASGD: averaged stochastic gradient descent."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative, regularised, scalar_state


class ASGD(UpdateRule):
    """As torch: `p = (1 - lambd * eta) * p - eta * g`, `ax += mu * (p - ax)`, and then, t from 1,

    `eta = lr / (1 + lambd * lr * t)^alpha`, `mu = 1 / max(1, t - t0)`.
    State: `ax` (the average of the parameter) and of rank 0 `eta` (from the lr that the optimizer is made with), `mu`
    (from 1), `step` (t).
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
        """Make the average and the rates."""
        self.make_zeros("ax")
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["eta"] = scalar_state(parameter, float(group["lr"]))
                self.state[parameter]["mu"] = scalar_state(parameter, 1.0)

    def state_names_to_sparsify(self) -> list[str]:
        """The average."""
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
