"""Adafactor: mean squares of gradients from the means of their rows and columns."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative, is_zero


class Adafactor(UpdateRule):
    """Adafactor: the mean squares of a matrix's gradients, kept as the means of rows and columns.

    For a parameter p with the gradient g, in update t (from 1)::

        b = 1 - t^decay_rate
        v = b * v + (1 - b) * (g^2 + eps[0])
        u = g / sqrt(v)
        u = u / max(1, rms(u) / clip_threshold)
        a = lr * max(eps[1], rms(p)) if scale_parameter else lr
        p = p - a * weight_decay * p - a * u

    A tensor of rank 2 or more keeps only the means r of v over its last dimension and c over its last but one, and has
    `v = r * c / mean(r)`. torch's Adafactor has other defaults, adds eps elsewhere, and replaces lr by
    `min(lr, 1 / sqrt(t))`.

    State: `exp_avg_sq_row` and `exp_avg_sq_col`, or `exp_avg_sq` below rank 2; `step` (t, rank 0).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative. It is needed.
        eps: The term added to g^2, and the least root mean square of p.
        clip_threshold: The largest root mean square of an update. Only 1.0 is supported.
        decay_rate: The exponent of t in the decay.
        beta1: The decay of a first moment. Only None is supported.
        weight_decay: The decoupled weight decay, not negative.
        scale_parameter: Whether the rate is multiplied by the root mean square of p.
        relative_step: Whether the rate follows from t. Only False is supported.
        warmup_init: Whether such a rate begins small. Only False is supported.

    Raises:
        ValueError: A setting is out of range or not supported.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = False,
        warmup_init: bool = False,
    ) -> None:
        if lr is None or relative_step or warmup_init:
            raise ValueError("Adafactor needs an lr; relative_step and warmup_init must be False")
        if clip_threshold != 1.0 or beta1 is not None:
            raise ValueError("Adafactor has a clip_threshold of 1.0 and no beta1 only")
        check_not_negative(lr=lr, weight_decay=weight_decay, **{"first eps": eps[0], "second eps": eps[1]})
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, defaults, enable_global_step=True)

    def preinitialize(self) -> None:
        """Makes the mean squares."""
        for parameter in self.parameters():
            state = self.state[parameter]
            if parameter.ndim >= 2:
                shape = parameter.shape
                state["exp_avg_sq_row"] = parameter.new_zeros(shape[:-1])
                state["exp_avg_sq_col"] = parameter.new_zeros((*shape[:-2], shape[-1]))
            else:
                state["exp_avg_sq"] = torch.zeros_like(parameter)

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        smallest_square, smallest_scale = group["eps"]
        step = self.increment_global_step(parameter)
        fresh = torch.pow(step, group["decay_rate"])
        change = gradient * self._inverse_root(parameter, gradient * gradient + smallest_square, fresh)
        change = change / (_root_mean_square(change) / group["clip_threshold"]).clamp(min=1)
        rate = group["lr"]
        if group["scale_parameter"]:
            rate = rate * _root_mean_square(parameter).clamp(min=smallest_scale)
        if not is_zero(group["weight_decay"]):
            parameter.sub_(rate * group["weight_decay"] * parameter)
        parameter.sub_(rate * change)

    def _inverse_root(self, parameter: torch.Tensor, squares: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """`1 / sqrt(v)`, for new squares with the weight `fresh`."""
        state = self.state[parameter]
        if parameter.ndim < 2:
            every: torch.Tensor = state["exp_avg_sq"]
            return every.add_(fresh * (squares - every)).rsqrt()
        rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        rows.add_(fresh * (squares.mean(-1) - rows))
        columns.add_(fresh * (squares.mean(-2) - columns))
        return (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1) * columns.unsqueeze(-2).rsqrt()


def _root_mean_square(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean().sqrt()
