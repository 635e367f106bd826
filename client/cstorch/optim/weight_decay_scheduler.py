"""Weight decay schedules: the forms of cstorch.optim.scheduler, writing `group["weight_decay"]`.

Each has the formula and the parameters of its form.
"""

from typing import Any

from cstorch.optim.scheduler import (
    ChainedScheduler,
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

__all__ = [
    "ChainedScheduler",
    "ChainedWD",
    "ConstantScheduler",
    "ConstantWD",
    "CosineAnnealingScheduler",
    "CosineAnnealingWD",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWarmRestartsWD",
    "CosineDecayScheduler",
    "CosineDecayWD",
    "CyclicScheduler",
    "CyclicWD",
    "ExponentialScheduler",
    "ExponentialWD",
    "InverseExponentialTimeDecayScheduler",
    "InverseExponentialTimeDecayWD",
    "InverseSquareRootDecayScheduler",
    "InverseSquareRootDecayWD",
    "LambdaScheduler",
    "LambdaWD",
    "LinearScheduler",
    "LinearWD",
    "MultiStepScheduler",
    "MultiStepWD",
    "MultiplicativeScheduler",
    "MultiplicativeWD",
    "OneCycleScheduler",
    "OneCycleWD",
    "PiecewiseConstantScheduler",
    "PiecewiseConstantWD",
    "PolynomialScheduler",
    "PolynomialWD",
    "ScalePerParamScheduler",
    "ScalePerParamWD",
    "Scheduler",
    "SequentialScheduler",
    "SequentialWD",
    "StepScheduler",
    "StepWD",
    "WeightDecayScheduler",
]


class WeightDecayScheduler(Scheduler):
    """The base class of weight decay schedules. A subclass overrides `_get_closed_form`.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        total_iters: The number of steps that the schedule is made for; None: no end.
        last_epoch: The epoch before the first one.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Reference: release 2.10, `cerebras.pytorch.optim.weight_decay_scheduler`.
    """

    @property
    def param_group_key(self) -> str:
        """The weight decay."""
        return "weight_decay"


# --- The weight decay schedules, from the forms -----------------------------------------------------------------------


def _wd(form: type[Scheduler], **more: Any) -> type[Any]:
    """Returns the weight decay schedule of a form. The stub file, by docs/schedule_stubs.py, has its type."""
    return derived(form, WeightDecayScheduler, form.__name__.replace("Scheduler", "WD"), __name__, **more)


ConstantWD = _wd(ConstantScheduler)
PolynomialWD = _wd(PolynomialScheduler)
LinearWD = _wd(LinearScheduler)
ExponentialWD = _wd(ExponentialScheduler)
StepWD = _wd(StepScheduler)
MultiStepWD = _wd(MultiStepScheduler)
InverseExponentialTimeDecayWD = _wd(InverseExponentialTimeDecayScheduler)
InverseSquareRootDecayWD = _wd(InverseSquareRootDecayScheduler)
CosineDecayWD = _wd(CosineDecayScheduler)
CosineAnnealingWD = _wd(CosineAnnealingScheduler)
CosineAnnealingWarmRestartsWD = _wd(CosineAnnealingWarmRestartsScheduler)
CyclicWD = _wd(CyclicScheduler)
OneCycleWD = _wd(OneCycleScheduler)
LambdaWD = _wd(LambdaScheduler)
MultiplicativeWD = _wd(MultiplicativeScheduler)
SequentialWD = _wd(SequentialScheduler, annotations={"schedulers": list[WeightDecayScheduler]})
PiecewiseConstantWD = _wd(PiecewiseConstantScheduler, fixed={"constant_cls": ConstantWD})
ChainedWD = _wd(ChainedScheduler, annotations={"schedulers": list[WeightDecayScheduler]})
ScalePerParamWD = _wd(ScalePerParamScheduler, annotations={"scheduler": WeightDecayScheduler})
