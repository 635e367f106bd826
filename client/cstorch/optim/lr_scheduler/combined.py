"""Learning rates made of others, or of functions. e = last_epoch."""

import torch

from cstorch.optim.lr_scheduler.base import LRScheduler
from cstorch.optim.lr_scheduler.decays import ConstantLR
from cstorch.optim.scheduler import ChainedScheduler as BaseChainedScheduler
from cstorch.optim.scheduler import (
    LambdaScheduler,
    MultiplicativeScheduler,
    PiecewiseConstantScheduler,
    ScalePerParamScheduler,
    SequentialScheduler,
)
from cstorch.optim.scheduler.base import Renamed, Tags


class SequentialLR(SequentialScheduler, LRScheduler):
    """schedulers[i] up to milestones[i] (exclusive), then the next from its own epoch 0."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: list[LRScheduler],
        milestones: list[int],
        last_epoch: int = -1,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, [*schedulers], milestones, last_epoch, param_group_tags)


class PiecewiseConstantLR(PiecewiseConstantScheduler, LRScheduler):
    """learning_rates[i] up to milestones[i] (exclusive), then the next."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rates: list[float],
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, ConstantLR, learning_rates, milestones, param_group_tags)


class ChainedLR(BaseChainedScheduler, LRScheduler):
    """The first schedule's value, times `value / initial value` of each other one."""

    def __init__(self, schedulers: list[LRScheduler], param_group_tags: Tags = None) -> None:
        super().__init__([*schedulers], param_group_tags)


class ChainedScheduler(ChainedLR):
    """A ChainedLR, by the name that torch has for it."""


class ScalePerParamLR(ScalePerParamScheduler, LRScheduler):
    """The scheduler's value, for each parameter group times its "adjust_learning_rate" (1 where it has none)."""

    _scalars_name = "lr_adjustment_scalars"

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, param_group_tags: Tags = None) -> None:
        super().__init__(optimizer, scheduler, param_group_tags)


class LambdaLR(LambdaScheduler, LRScheduler):
    """The product of `initial * f(e)`, for each function f that `set_value_lambda`, to be overridden, returns."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, param_group_tags: Tags = None
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, param_group_tags)


class MultiplicativeLR(MultiplicativeScheduler, LRScheduler):
    """`initial * coefficient^e`; a subclass may compute the coefficient from e: `set_value_lambda`."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        coefficient: float,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, coefficient, param_group_tags)
