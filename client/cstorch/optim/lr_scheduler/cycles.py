"""Learning rates that follow a cosine, or rise and fall. e = last_epoch, T = total_iters."""

import torch

from cstorch.optim.lr_scheduler.base import LRScheduler
from cstorch.optim.scheduler import (
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineDecayScheduler,
    CyclicScheduler,
    OneCycleScheduler,
)
from cstorch.optim.scheduler.base import Renamed, Tags


class CosineDecayLR(CosineDecayScheduler, LRScheduler):
    """`end + (initial - end) * (1 + cos(pi * min(e, T) / T)) / 2`."""

    initial_learning_rate = Renamed("initial_val")
    end_learning_rate = Renamed("end_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, end_learning_rate, total_iters, param_group_tags)


class CosineAnnealingLR(CosineAnnealingScheduler, LRScheduler):
    """`eta_min + (initial - eta_min) * (1 + cos(pi * e / T_max)) / 2`: down until T_max, and up again after it."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        T_max: int,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, T_max, eta_min, param_group_tags)


class CosineAnnealingWarmRestarts(CosineAnnealingWarmRestartsScheduler, LRScheduler):
    """`eta_min + (initial - eta_min) * (1 + cos(pi * (e mod T_0) / T_0)) / 2`; T_mult must be 1."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        T_0: int,
        T_mult: int = 1,
        eta_min: float = 0.0,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, T_0, T_mult, eta_min, param_group_tags)


class CyclicLR(CyclicScheduler, LRScheduler):
    """From base_lr to max_lr and back, again and again, scaled by the mode: see CyclicScheduler."""

    base_lr = Renamed("base_val")
    max_lr = Renamed("max_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        base_lr: float,
        max_lr: float,
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_mode: str = "cycle",
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(
            optimizer, base_lr, max_lr, step_size_up, step_size_down, mode, gamma, scale_mode, param_group_tags
        )


class OneCycleLR(OneCycleScheduler, LRScheduler):
    """Up to max_lr once, and down to `initial / final_div_factor`: see OneCycleScheduler."""

    initial_learning_rate = Renamed("initial_val")
    max_lr = Renamed("max_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        max_lr: float,
        total_steps: int = 1000,
        pct_start: float = 0.3,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        anneal_strategy: str = "cos",
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(
            optimizer,
            initial_learning_rate,
            max_lr,
            total_steps,
            pct_start,
            final_div_factor,
            three_phase,
            anneal_strategy,
            param_group_tags,
        )
