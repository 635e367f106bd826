"""optimizer_step: from the loss to the updated weights, with or without a gradient scaler."""

import torch

from cstorch.amp.grad_scaler import GradScaler
from cstorch.amp.updates import clip_norm, unscaled_norm
from cstorch.errors import ConfigurationError


def optimizer_step(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    grad_scaler: GradScaler | None = None,
    max_gradient_norm: float | None = None,
    max_gradient_value: float | None = None,
) -> None:
    """One update, from zero_grad on: backward, unscale, clip, step, update of the scale.

    Args:
        loss: of the step; rank 0.
        grad_scaler: a GradScaler, or None to leave gradients as they are.
        max_gradient_norm: clip the norm over all gradients to this.
        max_gradient_value: clip every element of a gradient to this; not together with max_gradient_norm.

    Raises:
        ConfigurationError: both limits are given, or one is negative.
    """
    if max_gradient_norm is not None and max_gradient_value is not None:
        raise ConfigurationError("max_gradient_norm and max_gradient_value exclude each other: choose one")
    for name, limit in (("max_gradient_norm", max_gradient_norm), ("max_gradient_value", max_gradient_value)):
        if limit is not None and limit < 0:
            raise ConfigurationError(f"{name} must not be negative, got {limit}")
    optimizer.zero_grad()
    if grad_scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        grad_scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        grad_scaler.unscale_(optimizer)
    if max_gradient_norm is not None:
        clip_norm(optimizer, max_gradient_norm, unscaled_norm(optimizer))
    elif max_gradient_value is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_value_(parameters, max_gradient_value)
    if grad_scaler is None:
        optimizer.step()
    else:
        grad_scaler.step(optimizer)
        grad_scaler.update()
