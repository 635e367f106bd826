"""The schedules of releases 1.6 to 1.9: under their older names, with the parameter `disable_lr_steps_reset`.

The parameter changes nothing: schedules count the steps of the optimizer and are never reset.
"""

import inspect
import types
from typing import Any, Final

import torch

from cstorch._internal.generations import inherit
from cstorch.optim import lr_scheduler
from cstorch.optim.scheduler_base import Tags, bound, with_signature

__all__ = [
    "Constant",
    "CosineAnnealing",
    "CosineAnnealingWarmRestarts",
    "CosineDecay",
    "CyclicLR",
    "Exponential",
    "InverseExponentialTimeDecay",
    "InverseSquareRootDecay",
    "Lambda",
    "MultiStep",
    "Multiplicative",
    "OneCycleLR",
    "Polynomial",
    "ScalePerParamLR",
    "Step",
]

__getattr__ = inherit("cerebras_pytorch.optim.lr_scheduler", "cstorch.optim.lr_scheduler")

_RESET: Final = "disable_lr_steps_reset"
_RESET_ENTRY: Final = f"{_RESET}: Changes nothing: the counter of steps is never reset."


def _older(newer: type[Any], name: str) -> type[Any]:
    """Returns a schedule under its older name, with `disable_lr_steps_reset` before `param_group_tags`."""
    newer_parameters = inspect.signature(newer.__init__).parameters
    *settings, tags = newer_parameters.values()
    reset = inspect.Parameter(_RESET, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False, annotation=bool)
    signature = inspect.Signature([*settings, reset, tags], return_annotation=None)

    def __init__(self: lr_scheduler.LRScheduler, *args: Any, **kwargs: Any) -> None:
        given = bound(signature, self, args, kwargs)
        given.pop(_RESET, None)
        newer.__init__(self, **given)

    doc = (newer.__doc__ or "").replace("    param_group_tags:", f"    {_RESET_ENTRY}\n    param_group_tags:")
    doc = doc.replace("release 2.10, `cerebras.pytorch.optim", "releases 1.6 to 1.9, `cerebras_pytorch.optim")
    constructor = with_signature(__init__, signature, name, __name__)
    members = {"__init__": constructor, "__doc__": doc, "__module__": __name__}
    return types.new_class(name, (newer,), exec_body=lambda body: body.update(members))


Constant = _older(lr_scheduler.ConstantLR, "Constant")
Polynomial = _older(lr_scheduler.PolynomialLR, "Polynomial")
Exponential = _older(lr_scheduler.ExponentialLR, "Exponential")
InverseExponentialTimeDecay = _older(lr_scheduler.InverseExponentialTimeDecayLR, "InverseExponentialTimeDecay")
InverseSquareRootDecay = _older(lr_scheduler.InverseSquareRootDecayLR, "InverseSquareRootDecay")
CosineDecay = _older(lr_scheduler.CosineDecayLR, "CosineDecay")
CosineAnnealing = _older(lr_scheduler.CosineAnnealingLR, "CosineAnnealing")
CosineAnnealingWarmRestarts = _older(lr_scheduler.CosineAnnealingWarmRestarts, "CosineAnnealingWarmRestarts")
MultiStep = _older(lr_scheduler.MultiStepLR, "MultiStep")
Lambda = _older(lr_scheduler.LambdaLR, "Lambda")
Multiplicative = _older(lr_scheduler.MultiplicativeLR, "Multiplicative")
CyclicLR = _older(lr_scheduler.CyclicLR, "CyclicLR")
OneCycleLR = _older(lr_scheduler.OneCycleLR, "OneCycleLR")


class ScalePerParamLR(lr_scheduler.ScalePerParamLR):
    """A schedule whose value is multiplied, for each parameter group, by the group's "adjust_learning_rate".

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        scheduler: The schedule to scale, of this optimizer.
        decay_steps: Changes nothing: the schedule has its own number of steps.
        disable_lr_steps_reset: Changes nothing: the counter of steps is never reset.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: lr_scheduler.LRScheduler,
        decay_steps: int | None = None,
        disable_lr_steps_reset: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, scheduler, param_group_tags)


class Step(lr_scheduler.StepLR):
    """A decay in equal steps: `StepLR`, with its arguments in another order.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        initial_learning_rate: The learning rate at epoch 0.
        gamma: The factor of each decay.
        step_size: The number of epochs between two decays, at least 1.
        disable_lr_steps_reset: Changes nothing: the counter of steps is never reset.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        gamma: float,
        step_size: int,
        disable_lr_steps_reset: bool = False,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, step_size, gamma)
