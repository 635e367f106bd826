"""The schedules that decay as the inverse of a power of the epoch. e = last_epoch, T = total_iters."""

import torch

from cstorch.optim.scheduler.base import Scheduler, Tags, check_positive


class InverseExponentialTimeDecayScheduler(Scheduler):
    """`initial / (1 + decay_rate * e^step_exponent / T)`; with staircase `e^step_exponent / T` is rounded down."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        step_exponent: int,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("total_iters", total_iters)
        self.initial_val = initial_val
        self.step_exponent = step_exponent
        self.decay_rate = decay_rate
        self.staircase = staircase
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        time = torch.pow(self.last_epoch.to(torch.float32), self.step_exponent) / self.total_iters
        if self.staircase:
            time = torch.floor(time)
        return self.initial_val / (1 + time * self.decay_rate)


class InverseSquareRootDecayScheduler(Scheduler):
    """`initial * scale / sqrt(max(warmup_steps, e))`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("warmup_steps", warmup_steps)
        self.initial_val = initial_val
        self.scale = scale
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        steps = self.last_epoch.to(torch.float32).clamp(min=self.warmup_steps)
        return self.initial_val * self.scale / steps.sqrt()
