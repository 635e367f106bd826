"""The types of cstorch.optim.lr_scheduler. Written by docs/schedule_stubs.py."""

from abc import ABCMeta
from typing import Any

import torch

from cstorch.optim import scheduler
from cstorch.optim.scheduler_base import Scheduler as Scheduler
from cstorch.optim.scheduler_base import Tags

BaseChainedScheduler = scheduler.ChainedScheduler
ConstantScheduler = scheduler.ConstantScheduler
CosineAnnealingScheduler = scheduler.CosineAnnealingScheduler
CosineAnnealingWarmRestartsScheduler = scheduler.CosineAnnealingWarmRestartsScheduler
CosineDecayScheduler = scheduler.CosineDecayScheduler
CyclicScheduler = scheduler.CyclicScheduler
ExponentialScheduler = scheduler.ExponentialScheduler
InverseExponentialTimeDecayScheduler = scheduler.InverseExponentialTimeDecayScheduler
InverseSquareRootDecayScheduler = scheduler.InverseSquareRootDecayScheduler
LambdaScheduler = scheduler.LambdaScheduler
LinearScheduler = scheduler.LinearScheduler
MultiplicativeScheduler = scheduler.MultiplicativeScheduler
MultiStepScheduler = scheduler.MultiStepScheduler
OneCycleScheduler = scheduler.OneCycleScheduler
PiecewiseConstantScheduler = scheduler.PiecewiseConstantScheduler
PolynomialScheduler = scheduler.PolynomialScheduler
ScalePerParamScheduler = scheduler.ScalePerParamScheduler
SequentialScheduler = scheduler.SequentialScheduler
StepScheduler = scheduler.StepScheduler

class LRScheduler(Scheduler):
    def __init_subclass__(cls, **kwargs: Any) -> None: ...
    @property
    def param_group_key(self) -> str: ...
    def get_last_lr(self) -> list[Any]: ...
    def get_lr(self) -> list[torch.Tensor]: ...
    def _get_closed_form(self) -> torch.Tensor: ...
    def _get_closed_form_lr(self) -> torch.Tensor: ...

class ConstantLR(scheduler.ConstantScheduler, LRScheduler):
    learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, learning_rate: float, total_iters: int | None = None, param_group_tags: Tags = None) -> None: ...

class PolynomialLR(scheduler.PolynomialScheduler, LRScheduler):
    end_learning_rate: Any
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, end_learning_rate: float, total_iters: int, power: float = 1.0, cycle: bool = False, param_group_tags: Tags = None) -> None: ...

class LinearLR(scheduler.LinearScheduler, LRScheduler):
    end_learning_rate: Any
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, end_learning_rate: float, total_iters: int, cycle: bool = False, param_group_tags: Tags = None) -> None: ...

class ExponentialLR(scheduler.ExponentialScheduler, LRScheduler):
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, total_iters: int, decay_rate: float, staircase: bool = False, param_group_tags: Tags = None) -> None: ...

class StepLR(scheduler.StepScheduler, LRScheduler):
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, step_size: int, gamma: float, param_group_tags: Tags = None) -> None: ...

class MultiStepLR(scheduler.MultiStepScheduler, LRScheduler):
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, gamma: float, milestones: list[int], param_group_tags: Tags = None) -> None: ...

class InverseExponentialTimeDecayLR(scheduler.InverseExponentialTimeDecayScheduler, LRScheduler):
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, step_exponent: int, total_iters: int, decay_rate: float, staircase: bool = False, param_group_tags: Tags = None) -> None: ...

class InverseSquareRootDecayLR(scheduler.InverseSquareRootDecayScheduler, LRScheduler):
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float = 1.0, scale: float = 1.0, warmup_steps: int = 1, param_group_tags: Tags = None) -> None: ...

class CosineDecayLR(scheduler.CosineDecayScheduler, LRScheduler):
    end_learning_rate: Any
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, end_learning_rate: float, total_iters: int, param_group_tags: Tags = None) -> None: ...

class CosineAnnealingLR(scheduler.CosineAnnealingScheduler, LRScheduler):
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, T_max: int, eta_min: float = 0.0, param_group_tags: Tags = None) -> None: ...

class CosineAnnealingWarmRestarts(scheduler.CosineAnnealingWarmRestartsScheduler, LRScheduler):
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0, param_group_tags: Tags = None) -> None: ...

class CyclicLR(scheduler.CyclicScheduler, LRScheduler):
    base_lr: Any
    max_lr: Any
    def __init__(self, optimizer: torch.optim.Optimizer, base_lr: float, max_lr: float, step_size_up: int = 2000, step_size_down: int | None = None, mode: str = 'triangular', gamma: float = 1.0, scale_mode: str = 'cycle', param_group_tags: Tags = None) -> None: ...

class OneCycleLR(scheduler.OneCycleScheduler, LRScheduler):
    initial_learning_rate: Any
    max_lr: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, max_lr: float, total_steps: int = 1000, pct_start: float = 0.3, final_div_factor: float = 10000.0, three_phase: bool = False, anneal_strategy: str = 'cos', param_group_tags: Tags = None) -> None: ...

class LambdaLR(scheduler.LambdaScheduler, LRScheduler):
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, param_group_tags: Tags = None) -> None: ...
    def set_lr_lambda(self) -> Any: ...

class MultiplicativeLR(scheduler.MultiplicativeScheduler, LRScheduler):
    initial_learning_rate: Any
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, coefficient: float, param_group_tags: Tags = None) -> None: ...
    def set_lr_lambda(self) -> Any: ...

class SequentialLR(scheduler.SequentialScheduler, LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, schedulers: list[LRScheduler], milestones: list[int], last_epoch: int = -1, param_group_tags: Tags = None) -> None: ...

class PiecewiseConstantLR(scheduler.PiecewiseConstantScheduler, LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, learning_rates: list[float], milestones: list[int], param_group_tags: Tags = None) -> None: ...

class ChainedLR(scheduler.ChainedScheduler, LRScheduler):
    def __init__(self, schedulers: list[LRScheduler], param_group_tags: Tags = None) -> None: ...

class ScalePerParamLR(scheduler.ScalePerParamScheduler, LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, param_group_tags: Tags = None) -> None: ...

class ChainedScheduler(ChainedLR):
    pass
