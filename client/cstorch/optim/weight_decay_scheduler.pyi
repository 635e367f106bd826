"""The types of cstorch.optim.weight_decay_scheduler. Written by docs/schedule_stubs.py."""

from abc import ABCMeta
from typing import Any

import torch

from cstorch.optim import scheduler
from cstorch.optim.scheduler_base import Scheduler as Scheduler
from cstorch.optim.scheduler_base import Tags

ChainedScheduler = scheduler.ChainedScheduler
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

class WeightDecayScheduler(Scheduler, metaclass=ABCMeta):
    @property
    def param_group_key(self) -> str: ...

class ConstantWD(scheduler.ConstantScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, val: float, total_iters: int | None = None, param_group_tags: Tags = None) -> None: ...

class PolynomialWD(scheduler.PolynomialScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, end_val: float, total_iters: int, power: float = 1.0, cycle: bool = False, param_group_tags: Tags = None) -> None: ...

class LinearWD(scheduler.LinearScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, end_val: float, total_iters: int, cycle: bool = False, param_group_tags: Tags = None) -> None: ...

class ExponentialWD(scheduler.ExponentialScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, total_iters: int, decay_rate: float, staircase: bool = False, param_group_tags: Tags = None) -> None: ...

class StepWD(scheduler.StepScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, step_size: int, gamma: float, param_group_tags: Tags = None) -> None: ...

class MultiStepWD(scheduler.MultiStepScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, gamma: float, milestones: list[int], param_group_tags: Tags = None) -> None: ...

class InverseExponentialTimeDecayWD(scheduler.InverseExponentialTimeDecayScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, step_exponent: int, total_iters: int, decay_rate: float, staircase: bool = False, param_group_tags: Tags = None) -> None: ...

class InverseSquareRootDecayWD(scheduler.InverseSquareRootDecayScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float = 1.0, scale: float = 1.0, warmup_steps: int = 1, param_group_tags: Tags = None) -> None: ...

class CosineDecayWD(scheduler.CosineDecayScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, end_val: float, total_iters: int, param_group_tags: Tags = None) -> None: ...

class CosineAnnealingWD(scheduler.CosineAnnealingScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, T_max: int, eta_min: float = 0.0, param_group_tags: Tags = None) -> None: ...

class CosineAnnealingWarmRestartsWD(scheduler.CosineAnnealingWarmRestartsScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0, param_group_tags: Tags = None) -> None: ...

class CyclicWD(scheduler.CyclicScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, base_val: float, max_val: float, step_size_up: int = 2000, step_size_down: int | None = None, mode: str = 'triangular', gamma: float = 1.0, scale_mode: str = 'cycle', param_group_tags: Tags = None) -> None: ...

class OneCycleWD(scheduler.OneCycleScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, max_val: float, total_steps: int = 1000, pct_start: float = 0.3, final_div_factor: float = 10000.0, three_phase: bool = False, anneal_strategy: str = 'cos', param_group_tags: Tags = None) -> None: ...

class LambdaWD(scheduler.LambdaScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, param_group_tags: Tags = None) -> None: ...

class MultiplicativeWD(scheduler.MultiplicativeScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, coefficient: float, param_group_tags: Tags = None) -> None: ...

class SequentialWD(scheduler.SequentialScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, schedulers: list[WeightDecayScheduler], milestones: list[int], last_epoch: int = -1, param_group_tags: Tags = None) -> None: ...

class PiecewiseConstantWD(scheduler.PiecewiseConstantScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, vals: list[float], milestones: list[int], param_group_tags: Tags = None) -> None: ...

class ChainedWD(scheduler.ChainedScheduler, WeightDecayScheduler):
    def __init__(self, schedulers: list[WeightDecayScheduler], param_group_tags: Tags = None) -> None: ...

class ScalePerParamWD(scheduler.ScalePerParamScheduler, WeightDecayScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: WeightDecayScheduler, param_group_tags: Tags = None) -> None: ...
