"""Rprop: a step size for each element, by the sign of its gradient alone."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative


class Rprop(UpdateRule):
    """Rprop: a step size of each element that follows the sign of its gradient alone. As torch has it.

    For a parameter p with the gradient g: `p = p - s * sign(g)`. The step size s is multiplied by `etas[1]` where g has
    the sign of the update before, and by `etas[0]` where the sign changed. Where it changed, g counts as 0, in this
    update
    and as the gradient before of the next.

    State: `prev` (g) and `step_size` (s).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The first step size, not negative. A schedule of it has no effect.
        etas: The factors by which a step size shrinks (between 0 and 1) and grows (above 1).
        step_sizes: The least and the greatest step size, positive.

    Raises:
        ValueError: A setting is out of range.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50.0),
    ) -> None:
        check_not_negative(lr=lr)
        if not 0 < etas[0] < 1 < etas[1]:
            raise ValueError(f"Invalid etas: {etas}. The first must be between 0 and 1, the second above 1")
        if not 0 < step_sizes[0] < step_sizes[1]:
            raise ValueError(f"Invalid step_sizes: {step_sizes}. They must be positive, and the first the smaller one")
        super().__init__(params, {"lr": lr, "etas": etas, "step_sizes": step_sizes})

    def preinitialize(self) -> None:
        """Makes the gradients before and the step sizes."""
        self.make_zeros("prev")
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step_size"] = torch.full_like(parameter, float(group["lr"]))

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the gradients before and the step sizes."""
        return ["prev", "step_size"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        shrink, grow = group["etas"]
        smallest, largest = group["step_sizes"]
        previous, size = self.state[parameter]["prev"], self.state[parameter]["step_size"]
        product = gradient * previous
        changed = product < 0
        factored = torch.where(changed, size * shrink, torch.where(product > 0, size * grow, size))
        size.copy_(factored.clamp(smallest, largest))
        gradient = gradient.masked_fill(changed, 0)
        previous.copy_(gradient)
        parameter.sub_(size * torch.sign(gradient))
