"""Learning rate schedules: the forms of cstorch.optim.scheduler, with learning rate names, writing `group["lr"]`."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from cstorch.optim.scheduler import ChainedScheduler as BaseChainedScheduler
from cstorch.optim.scheduler import (
    ConstantScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineDecayScheduler,
    CyclicScheduler,
    ExponentialScheduler,
    InverseExponentialTimeDecayScheduler,
    InverseSquareRootDecayScheduler,
    LambdaScheduler,
    LinearScheduler,
    MultiplicativeScheduler,
    MultiStepScheduler,
    OneCycleScheduler,
    PiecewiseConstantScheduler,
    PolynomialScheduler,
    ScalePerParamScheduler,
    Scheduler,
    SequentialScheduler,
    StepScheduler,
)
from cstorch.optim.scheduler_base import derived

# --- The base class of learning rate schedules ------------------------------------------------------------------------


class LRScheduler(Scheduler):
    """The base class of learning rate schedules. A subclass overrides `_get_closed_form_lr`.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        total_iters: The number of steps that the schedule is made for; None: no end.
        last_epoch: The epoch before the first one.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Example:
        A warm-up of 100 steps, then a decay. `step` is called in each traced step::

            optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-3)
            schedule = cstorch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    cstorch.optim.lr_scheduler.LinearLR(optimizer, 0.0, 1e-3, 100),
                    cstorch.optim.lr_scheduler.CosineDecayLR(optimizer, 1e-3, 1e-5, 900),
                ],
                milestones=[100],
            )

    Reference: release 2.10, `cerebras.pytorch.optim.lr_scheduler`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "get_lr" in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides get_lr, which only shows the learning rate: in its place define "
                "_get_closed_form_lr(self), which returns that of all groups as a tensor computed from self.last_epoch"
            )

    @property
    def param_group_key(self) -> str:
        """The learning rate."""
        return "lr"

    def get_last_lr(self) -> list[Any]:
        """Returns the learning rate evaluated last, for each parameter group: numbers, or tensors in a traced step."""
        value = self.get_last_value()
        return [self._value_for(group, value) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[torch.Tensor]:
        """Returns the learning rate for the current epoch, for each parameter group, as tensors."""
        value = self.get()
        return [self._value_for(group, value) for group in self.optimizer.param_groups]

    def _get_closed_form(self) -> torch.Tensor:
        return self._get_closed_form_lr()

    def _get_closed_form_lr(self) -> torch.Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} must define _get_closed_form_lr(self): "
            "the learning rate as a tensor computed from self.last_epoch"
        )


# --- The learning rate schedules, from the forms ----------------------------------------------------------------------

# The parameters of the forms that have another name in a learning rate schedule.
_LR_NAMES: Final = {
    "base_val": "base_lr",
    "end_val": "end_learning_rate",
    "initial_val": "initial_learning_rate",
    "max_val": "max_lr",
    "val": "learning_rate",
}


def _lr(
    form: type[Scheduler], name: str | None = None, members: Mapping[str, Any] | None = None, **more: Any
) -> type[Any]:
    """Returns the learning rate schedule of a form. The stub file, by docs/schedule_stubs.py, has its type."""
    name = name or form.__name__.replace("Scheduler", "LR")
    # A subclass overrides the formula by its name in the older releases, or in the newer ones.
    formula = {"_get_closed_form": LRScheduler._get_closed_form, "_get_closed_form_lr": form._get_closed_form}
    return derived(form, LRScheduler, name, __name__, names=_LR_NAMES, members={**formula, **(members or {})}, **more)


def _lambda_lr(form: type[LambdaScheduler] | type[MultiplicativeScheduler]) -> type[Any]:
    """The same for a form with functions of the epoch, which have an older name too."""

    def set_value_lambda(self: Any) -> Any:
        """Returns the functions of the epoch. A subclass overrides this, or set_lr_lambda."""
        return self.set_lr_lambda()

    return _lr(form, members={"set_value_lambda": set_value_lambda, "set_lr_lambda": form.set_value_lambda})


ConstantLR = _lr(ConstantScheduler)
PolynomialLR = _lr(PolynomialScheduler)
LinearLR = _lr(LinearScheduler)
ExponentialLR = _lr(ExponentialScheduler)
StepLR = _lr(StepScheduler)
MultiStepLR = _lr(MultiStepScheduler)
InverseExponentialTimeDecayLR = _lr(InverseExponentialTimeDecayScheduler)
InverseSquareRootDecayLR = _lr(InverseSquareRootDecayScheduler)
CosineDecayLR = _lr(CosineDecayScheduler)
CosineAnnealingLR = _lr(CosineAnnealingScheduler)
CosineAnnealingWarmRestarts = _lr(CosineAnnealingWarmRestartsScheduler, "CosineAnnealingWarmRestarts")
CyclicLR = _lr(CyclicScheduler)
OneCycleLR = _lr(OneCycleScheduler)
LambdaLR = _lambda_lr(LambdaScheduler)
MultiplicativeLR = _lambda_lr(MultiplicativeScheduler)
SequentialLR = _lr(SequentialScheduler, annotations={"schedulers": list[LRScheduler]})
PiecewiseConstantLR = _lr(
    PiecewiseConstantScheduler, unkept={"vals": "learning_rates"}, fixed={"constant_cls": ConstantLR}
)
ChainedLR = _lr(BaseChainedScheduler, "ChainedLR", annotations={"schedulers": list[LRScheduler]})
ScalePerParamLR = _lr(
    ScalePerParamScheduler,
    annotations={"scheduler": LRScheduler},
    members={"_scalars_name": "lr_adjustment_scalars"},
)


class ChainedScheduler(ChainedLR):
    """The value of the first schedule, multiplied by `value / initial_learning_rate` of each other one: `ChainedLR`.

    Args:
        schedulers: The schedules, all of one optimizer. They are no longer stepped on their own.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Reference: release 2.10, `cerebras.pytorch.optim.lr_scheduler`.
    """


__all__ = [
    "BaseChainedScheduler",
    "ChainedLR",
    "ChainedScheduler",
    "ConstantLR",
    "ConstantScheduler",
    "CosineAnnealingLR",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestarts",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineDecayLR",
    "CosineDecayScheduler",
    "CyclicLR",
    "CyclicScheduler",
    "ExponentialLR",
    "ExponentialScheduler",
    "InverseExponentialTimeDecayLR",
    "InverseExponentialTimeDecayScheduler",
    "InverseSquareRootDecayLR",
    "InverseSquareRootDecayScheduler",
    "LRScheduler",
    "LambdaLR",
    "LambdaScheduler",
    "LinearLR",
    "LinearScheduler",
    "MultiStepLR",
    "MultiStepScheduler",
    "MultiplicativeLR",
    "MultiplicativeScheduler",
    "OneCycleLR",
    "OneCycleScheduler",
    "PiecewiseConstantLR",
    "PiecewiseConstantScheduler",
    "PolynomialLR",
    "PolynomialScheduler",
    "ScalePerParamLR",
    "ScalePerParamScheduler",
    "Scheduler",
    "SequentialLR",
    "SequentialScheduler",
    "StepLR",
    "StepScheduler",
]
