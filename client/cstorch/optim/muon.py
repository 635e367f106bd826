"""Muon: momentum that is made orthogonal."""

from typing import Any

import torch

from cstorch.optim.optimizer import ParamsT, UpdateRule, check_not_negative, is_zero

# The polynomial a x + b x^3 + c x^5 of the iteration: the steepest at 0 that keeps singular values near 1.
A, B, C = 3.4445, -4.7750, 2.0315
SMALLEST_NORM = 1e-7


class Muon(UpdateRule):
    """Muon: a momentum that is made orthogonal. For parameters of at least two dimensions.

    For a parameter p with the gradient g::

        b = momentum * b + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * b if nesterov else b
        p = p - lr * weight_decay * p - lr * sqrt(max(1, rows / columns)) * orthogonal(u)

    `orthogonal` is `ns_steps` steps of Newton and Schulz's iteration from `x = u / norm(u)`: with `y = x x^T`,
    `x = 3.4445 x + (-4.775 y + 2.0315 y y) x`. All dimensions but the first are columns. torch iterates in bfloat16,
    this
    class in the type of p. State: `momentum_buffer` (b).

    Args:
        params: The parameters, or groups of them: dictionaries with "params" and settings of their own.
        lr: The learning rate, not negative.
        weight_decay: The decoupled weight decay, not negative.
        momentum: The decay of b, not negative.
        nesterov: Whether the step looks one momentum ahead.
        ns_steps: The number of steps of the iteration.

    Raises:
        ValueError: A setting is out of range, or a parameter has fewer than two dimensions.

    Reference: release 2.10, `cerebras.pytorch.optim`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay, momentum=momentum, ns_steps=ns_steps)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
        }
        super().__init__(params, defaults)

    def preinitialize(self) -> None:
        """Makes the momentum. Raises ValueError for a parameter that is no matrix."""
        for parameter in self.parameters():
            if parameter.ndim < 2:
                raise ValueError(
                    f"Muon is for matrices, not for a parameter of shape {tuple(parameter.shape)}: "
                    "give biases, norms and the like to another optimizer, AdamW for example"
                )
        self.make_zeros("momentum_buffer")

    def state_names_to_sparsify(self) -> list[str]:
        """Returns the names of the momentum."""
        return ["momentum_buffer"]

    def update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        momentum = group["momentum"]
        buffer: torch.Tensor = self.state[parameter]["momentum_buffer"]
        buffer.mul_(momentum).add_(gradient, alpha=1 - momentum)
        direction = gradient * (1 - momentum) + buffer * momentum if group["nesterov"] else buffer
        matrix = direction.flatten(1)
        rows, columns = matrix.shape
        change = _orthogonal(matrix, group["ns_steps"]).reshape(parameter.shape) * max(1, rows / columns) ** 0.5
        if not is_zero(group["weight_decay"]):
            change = change + group["weight_decay"] * parameter
        parameter.sub_(group["lr"] * change)


def _orthogonal(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """About U V^T, where the matrix is U S V^T."""
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix  # the product with its transpose is the smaller one
    x = x / torch.linalg.vector_norm(x).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        y = x @ x.T
        x = A * x + (B * y + C * (y @ y)) @ x
    return x.T if rows > columns else x
