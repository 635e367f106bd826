"""Learning rates that fall. e = last_epoch, T = total_iters."""

import torch

from cstorch.optim.lr_scheduler.base import LRScheduler
from cstorch.optim.scheduler import (
    ConstantScheduler,
    ExponentialScheduler,
    InverseExponentialTimeDecayScheduler,
    InverseSquareRootDecayScheduler,
    LinearScheduler,
    MultiStepScheduler,
    PolynomialScheduler,
    StepScheduler,
)
from cstorch.optim.scheduler.base import Renamed, Tags


class ConstantLR(ConstantScheduler, LRScheduler):
    """learning_rate, always."""

    learning_rate = Renamed("val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rate: float,
        total_iters: int | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, learning_rate, total_iters, param_group_tags)


class PolynomialLR(PolynomialScheduler, LRScheduler):
    """`(initial - end) * (1 - e / T)^power + end`, and end from T on; with cycle starting again at multiples of T."""

    initial_learning_rate = Renamed("initial_val")
    end_learning_rate = Renamed("end_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(
            optimizer, initial_learning_rate, end_learning_rate, total_iters, power, cycle, param_group_tags
        )


class LinearLR(LinearScheduler, LRScheduler):
    """From initial to end in T equal steps, then end."""

    initial_learning_rate = Renamed("initial_val")
    end_learning_rate = Renamed("end_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, end_learning_rate, total_iters, cycle, param_group_tags)


class ExponentialLR(ExponentialScheduler, LRScheduler):
    """`initial * decay_rate^(e / T)`; with staircase the exponent is rounded down."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, total_iters, decay_rate, staircase, param_group_tags)


class StepLR(StepScheduler, LRScheduler):
    """`initial * gamma^floor(e / step_size)`."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        step_size: int,
        gamma: float,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, step_size, gamma, param_group_tags)


class MultiStepLR(MultiStepScheduler, LRScheduler):
    """`initial * gamma^n`, n the number of milestones that are at most e."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        gamma: float,
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, gamma, milestones, param_group_tags)


class InverseExponentialTimeDecayLR(InverseExponentialTimeDecayScheduler, LRScheduler):
    """`initial / (1 + decay_rate * e^step_exponent / T)`; with staircase `e^step_exponent / T` is rounded down."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        step_exponent: int,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(
            optimizer, initial_learning_rate, step_exponent, total_iters, decay_rate, staircase, param_group_tags
        )


class InverseSquareRootDecayLR(InverseSquareRootDecayScheduler, LRScheduler):
    """`initial * scale / sqrt(max(warmup_steps, e))`."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, scale, warmup_steps, param_group_tags)
