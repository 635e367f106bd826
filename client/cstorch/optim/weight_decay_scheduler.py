"""Weight decay schedules: the forms of cstorch.optim.scheduler, writing `group["weight_decay"]`.

Each has the arguments of its form; e = last_epoch, T = total_iters.
"""

import torch

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
from cstorch.optim.scheduler_base import Tags

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
    """A schedule of the weight decay. A subclass gives the whole schedule as a tensor: `_get_closed_form`."""

    @property
    def param_group_key(self) -> str:
        """The weight decay."""
        return "weight_decay"


class ConstantWD(ConstantScheduler, WeightDecayScheduler):
    """val, always."""


class PolynomialWD(PolynomialScheduler, WeightDecayScheduler):
    """`(initial - end) * (1 - e / T)^power + end`, and end from T on."""


class LinearWD(LinearScheduler, WeightDecayScheduler):
    """From initial to end in T equal steps, then end."""


class ExponentialWD(ExponentialScheduler, WeightDecayScheduler):
    """`initial * decay_rate^(e / T)`."""


class InverseExponentialTimeDecayWD(InverseExponentialTimeDecayScheduler, WeightDecayScheduler):
    """`initial / (1 + decay_rate * e^step_exponent / T)`."""


class InverseSquareRootDecayWD(InverseSquareRootDecayScheduler, WeightDecayScheduler):
    """`initial * scale / sqrt(max(warmup_steps, e))`."""


class CosineDecayWD(CosineDecayScheduler, WeightDecayScheduler):
    """`end + (initial - end) * (1 + cos(pi * min(e, T) / T)) / 2`."""


class CosineAnnealingWD(CosineAnnealingScheduler, WeightDecayScheduler):
    """`eta_min + (initial - eta_min) * (1 + cos(pi * e / T_max)) / 2`."""


class CosineAnnealingWarmRestartsWD(CosineAnnealingWarmRestartsScheduler, WeightDecayScheduler):
    """`eta_min + (initial - eta_min) * (1 + cos(pi * (e mod T_0) / T_0)) / 2`."""


class CyclicWD(CyclicScheduler, WeightDecayScheduler):
    """From base to max and back, again and again."""


class OneCycleWD(OneCycleScheduler, WeightDecayScheduler):
    """Up to max once, and down to `initial / final_div_factor`."""


class StepWD(StepScheduler, WeightDecayScheduler):
    """`initial * gamma^floor(e / step_size)`."""


class MultiStepWD(MultiStepScheduler, WeightDecayScheduler):
    """`initial * gamma^n`, n the number of milestones that are at most e."""


class LambdaWD(LambdaScheduler, WeightDecayScheduler):
    """The product of `initial * f(e)`, for each function f that `set_value_lambda` returns."""


class MultiplicativeWD(MultiplicativeScheduler, WeightDecayScheduler):
    """`initial * coefficient^e`."""


class SequentialWD(SequentialScheduler, WeightDecayScheduler):
    """schedulers[i] up to milestones[i] (exclusive), then the next from its own epoch 0."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: list[WeightDecayScheduler],
        milestones: list[int],
        last_epoch: int = -1,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, [*schedulers], milestones, last_epoch, param_group_tags)


class ChainedWD(ChainedScheduler, WeightDecayScheduler):
    """The first schedule's value, times `value / initial value` of each other one."""

    def __init__(self, schedulers: list[WeightDecayScheduler], param_group_tags: Tags = None) -> None:
        super().__init__([*schedulers], param_group_tags)


class ScalePerParamWD(ScalePerParamScheduler, WeightDecayScheduler):
    """The scheduler's value, for each parameter group times its "adjust_learning_rate" (1 where it has none)."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: WeightDecayScheduler, param_group_tags: Tags = None
    ) -> None:
        super().__init__(optimizer, scheduler, param_group_tags)


class PiecewiseConstantWD(PiecewiseConstantScheduler, WeightDecayScheduler):
    """vals[i] up to milestones[i] (exclusive), then the next."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, vals: list[float], milestones: list[int], param_group_tags: Tags = None
    ) -> None:
        super().__init__(optimizer, ConstantWD, vals, milestones, param_group_tags)
