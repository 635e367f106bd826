"""The schedules that follow a cosine. e = last_epoch, T = total_iters."""

import math

import torch

from cstorch.optim.scheduler.base import Scheduler, Tags, check_positive


class CosineDecayScheduler(Scheduler):
    """`end + (initial - end) * (1 + cos(pi * min(e, T) / T)) / 2`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        end_val: float,
        total_iters: int,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("total_iters", total_iters)
        self.initial_val = initial_val
        self.end_val = end_val
        super().__init__(optimizer, total_iters, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        progress = torch.clamp(self.last_epoch, max=self.total_iters) / self.total_iters
        return (1 + torch.cos(progress * math.pi)) * (0.5 * (self.initial_val - self.end_val)) + self.end_val


class CosineAnnealingScheduler(Scheduler):
    """`eta_min + (initial - eta_min) * (1 + cos(pi * e / T_max)) / 2`: down until T_max, and up again after it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("T_max", T_max)
        self.initial_val = initial_val
        self.T_max = T_max
        self.eta_min = eta_min
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        progress = self.last_epoch / self.T_max
        return (1 + torch.cos(progress * math.pi)) * (0.5 * (self.initial_val - self.eta_min)) + self.eta_min


class CosineAnnealingWarmRestartsScheduler(Scheduler):
    """`eta_min + (initial - eta_min) * (1 + cos(pi * (e mod T_0) / T_0)) / 2`, as torch with T_mult 1, the only one.

    (In release 2.10 of the original the value stays what it is from e = T_0 on.)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_val: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        check_positive("T_0", T_0)
        if T_mult != 1:
            raise ValueError(f"T_mult must be 1, not {T_mult}: all cycles are of one length")
        self.initial_val = initial_val
        self.T_0 = T_0
        self.T_mult = T_mult
        self.eta_min = eta_min
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def _get_closed_form(self) -> torch.Tensor:
        progress = (self.last_epoch % self.T_0) / self.T_0
        return (1 + torch.cos(progress * math.pi)) * (0.5 * (self.initial_val - self.eta_min)) + self.eta_min
