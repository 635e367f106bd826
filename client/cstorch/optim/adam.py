"""Adam and AdamW: one update rule, two places for the weight decay."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from cstorch.optim.optimizer import (
    ParamsT,
    UpdateRule,
    check_betas,
    check_not_negative,
    is_zero,
    regularised,
    scalar_state,
)


class AdamBase(UpdateRule):
    """The base class of Adam and AdamW, which adds eps before the bias correction; torch adds it after.

    For a parameter p with the gradient g, in update t (from 1)::

        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g^2
        u = m / (sqrt(v) + eps)
        u = u * sqrt(1 - betas[1]^t) / (1 - betas[0]^t) if correct_bias else u
        p = p - lr * u

    State: `exp_avg` (m), `exp_avg_sq` (v), `max_exp_avg_sq` with amsgrad, and with correct_bias `beta1_power` and
    `beta2_power`: the beta to the power of the number of the next update, rank 0.

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        betas: The decays of m and v, each at least 0 and less than 1.
        eps: The term that keeps the divisor from zero, not negative.
        weight_decay: The weight decay, not negative; `decoupled_weight_decay` says how it is applied.
        correct_bias: Whether m and v are corrected for their start at zero.
        amsgrad: Whether the largest v so far divides m.

    Raises:
        ValueError: A setting is out of range.
    """

    @property
    @abstractmethod
    def decoupled_weight_decay(self) -> bool:
        """Whether the decay is added to the update, rather than to the gradient."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        amsgrad: bool = False,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "correct_bias": correct_bias,
            "amsgrad": amsgrad,
        }
        if self.decoupled_weight_decay:
            defaults["l2_regularization_rate"] = 0.0  # the real system's groups have it, and its Adam's decay is in it
        super().__init__(params, defaults)

    def preinitialize(self) -> None:
        """Makes the moments and the powers of the betas."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(parameter)
                if group["correct_bias"]:
                    beta1, beta2 = group["betas"]
                    state["beta1_power"] = scalar_state(parameter, beta1)
                    state["beta2_power"] = scalar_state(parameter, beta2)

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the moments."""
        return ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if not self.decoupled_weight_decay:
            gradient = regularised(group, parameter, gradient)
        state = self.state[parameter]
        beta1, beta2 = group["betas"]
        first: torch.Tensor = state["exp_avg"]
        second: torch.Tensor = state["exp_avg_sq"]
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["amsgrad"]:
            largest: torch.Tensor = state["max_exp_avg_sq"]
            second = largest.copy_(torch.maximum(largest, second))
        direction = first / (second.sqrt() + group["eps"])
        if group["correct_bias"]:
            direction = direction * _bias_correction(state, beta1, beta2)
        if self.decoupled_weight_decay and not is_zero(group["weight_decay"]):
            direction = direction + group["weight_decay"] * parameter
        parameter.sub_(group["lr"] * direction)


class Adam(AdamBase):
    """Adam with an L2 penalty: `weight_decay * p` is added to the gradient.

    For a parameter p with the gradient g, in update t (from 1)::

        g = g + weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g^2
        p = p - lr * m / (sqrt(v) + eps) * sqrt(1 - betas[1]^t) / (1 - betas[0]^t)

    torch adds eps after the bias correction. State: `exp_avg` (m), `exp_avg_sq` (v), `max_exp_avg_sq` with amsgrad,
    `beta1_power` and `beta2_power` (rank 0).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        betas: The decays of m and v, each at least 0 and less than 1.
        eps: The term that keeps the divisor from zero, not negative.
        weight_decay: The L2 penalty: `weight_decay * p` is added to g. Not negative.
        amsgrad: Whether the largest v so far divides m.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    decoupled_weight_decay = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads settings and state, as `Optimizer.load_state_dict`.

        Args:
            state_dict: What `state_dict` returned. Groups of the real system's Adam have the decay as
                "l2_regularization_rate".

        Raises:
            ValueError: Groups, names or shapes do not fit.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group in groups:
            if rate := group.pop("l2_regularization_rate", 0.0):
                group["weight_decay"] = rate
        super().load_state_dict({**state_dict, "param_groups": groups})


class AdamW(AdamBase):
    """Adam with decoupled weight decay.

    For a parameter p with the gradient g, in update t (from 1)::

        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g^2
        u = m / (sqrt(v) + eps)
        u = u * sqrt(1 - betas[1]^t) / (1 - betas[0]^t) if correct_bias else u
        p = p - lr * (u + weight_decay * p)

    torch adds eps after the bias correction. State: `exp_avg` (m), `exp_avg_sq`
    (v), `max_exp_avg_sq` with amsgrad, and with correct_bias `beta1_power` and `beta2_power` (rank 0).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        betas: The decays of m and v, each at least 0 and less than 1.
        eps: The term that keeps the divisor from zero, not negative.
        weight_decay: The decoupled weight decay, not negative.
        correct_bias: Whether m and v are corrected for their start at zero.
        amsgrad: Whether the largest v so far divides m.

    Raises:
        ValueError: A setting is out of range.

    Example:
        ::

            optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

            @cstorch.trace
            def training_step(batch):
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    decoupled_weight_decay = True


def _bias_correction(state: dict[str, torch.Tensor], beta1: float, beta2: float) -> torch.Tensor:
    beta1_power, beta2_power = state["beta1_power"], state["beta2_power"]
    correction = torch.sqrt(1 - beta2_power) / (1 - beta1_power)
    beta1_power.mul_(beta1)
    beta2_power.mul_(beta2)
    return correction
