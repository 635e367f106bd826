"""Checks of a step that would run, but give other numbers than the script expects of plain PyTorch."""

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from cstorch.errors import UsageError
from cstorch.tracing import Trace


def check_step(trace: Trace, model: nn.Module | None, traceable: Sequence[torch.optim.Optimizer]) -> None:
    """Warns of a step that has just been traced.

    Args:
        model: the compiled one that it called, if any.
        traceable: the optimizers of cstorch, whose settings may change in traced steps.

    Raises:
        UsageError: a schedule of torch sets the learning rate of an optimizer that stepped.
    """
    for optimizer in trace.optimizers:
        name = type(optimizer).__name__
        if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
            raise UsageError(
                f"a scheduler of torch.optim.lr_scheduler is attached to {name}: it sets numbers from outside, which a "
                "traced step does not see, so the learning rate would stay the first one. Use the scheduler of the "
                "same name in cstorch.optim.lr_scheduler, which is a function of the step"
            )
        if not any(optimizer is known for known in traceable):
            warnings.warn(
                f"{name} is an optimizer of torch: the settings of its groups are frozen as they are in the first "
                "step. Use the optimizer of the same name in cstorch.optim, or a subclass of cstorch.optim.Optimizer",
                stacklevel=2,
            )
    if trace.kept_gradients:
        names = ", ".join(name.removeprefix("state.model.") for name in trace.kept_gradients[:3])
        more = len(trace.kept_gradients) - 3
        warnings.warn(
            f"the step does not clear the gradients of {names}{f' and {more} more' if more > 0 else ''}: plain PyTorch "
            "would add the next step's gradients to them, but here every step begins without gradients. Call "
            "optimizer.zero_grad() in the step; to add up gradients of several batches, take one larger batch, with "
            "`cstorch.backends.csx.performance.micro_batch_size` if it needs too much memory",
            stacklevel=2,
        )
    if model is not None and model.training and not trace.optimizers:
        warnings.warn(
            "the model is in training mode, and the traced step steps no optimizer, which makes it an evaluation. Call "
            "model.eval() for one, or optimizer.step() in the traced function",
            stacklevel=2,
        )
