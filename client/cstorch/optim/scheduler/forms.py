"""The schedules that are one formula of the epoch. e = last_epoch, T = total_iters."""

import torch

from cstorch.optim.scheduler.base import Scheduler, Tags, check_positive


class ConstantScheduler(Scheduler):
    """val, always."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        val: float,
        total_iters: int | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        self.val = val
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    @property
    def initial_val(self) -> float:
        """val."""
        return self.val

    def _get_closed_form(self) -> torch.Tensor:
        return torch.full_like(self.last_epoch, self.val, dtype=torch.float32)


class PolynomialScheduler(Scheduler):
    """`(initial - end) * (1 - e / T)^power + end`, and end from T on.

    With cycle the decay starts again at each multiple of T, stretched over the whole range so far:
    `(1 - e / (T * ceil((e + 1) / T)))`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        end_val: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("total_iters", total_iters)
        self.initial_val = initial_val
        self.end_val = end_val
        self.power = power
        self.cycle = cycle
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        epoch = self.last_epoch
        if self.cycle:
            remaining = 1 - epoch / (self.total_iters * torch.ceil((epoch + 1) / self.total_iters))
        else:
            remaining = 1 - epoch / self.total_iters
        if self.power != 1:
            remaining = torch.pow(remaining, self.power)
        value = remaining * (self.initial_val - self.end_val) + self.end_val
        return value if self.cycle else torch.where(epoch >= self.total_iters, self.end_val, value)


class LinearScheduler(PolynomialScheduler):
    """From initial to end in T equal steps, then end."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        end_val: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_val, end_val, total_iters, 1.0, cycle, param_group_tags)


class ExponentialScheduler(Scheduler):
    """`initial * decay_rate^(e / T)`; with staircase the exponent is rounded down."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("total_iters", total_iters)
        self.initial_val = initial_val
        self.decay_rate = decay_rate
        self.staircase = staircase
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        exponent = self.last_epoch / self.total_iters
        if self.staircase:
            exponent = torch.floor(exponent)
        return torch.pow(self.decay_rate, exponent) * self.initial_val


class StepScheduler(Scheduler):
    """`initial * gamma^floor(e / step_size)`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        step_size: int,
        gamma: float,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("step_size", step_size)
        self.initial_val = initial_val
        self.step_size = step_size
        self.gamma = gamma
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        return torch.pow(self.gamma, torch.floor(self.last_epoch / self.step_size)) * self.initial_val


class MultiStepScheduler(Scheduler):
    """`initial * gamma^n`, n the number of milestones that are at most e."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        gamma: float,
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        self.initial_val = initial_val
        self.gamma = gamma
        self.milestones = sorted(milestones)
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        value = torch.full_like(self.last_epoch, self.initial_val, dtype=torch.float32)
        for passed, milestone in enumerate(self.milestones, start=1):
            value = torch.where(self.last_epoch >= milestone, self.initial_val * self.gamma**passed, value)
        return value
