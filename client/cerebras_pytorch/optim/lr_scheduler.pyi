"""The types of cerebras_pytorch.optim.lr_scheduler. Written by docs/schedule_stubs.py."""

from abc import ABCMeta
from typing import Any

import torch

from cstorch.optim import lr_scheduler
from cstorch.optim import scheduler
from cstorch.optim.scheduler_base import Scheduler as Scheduler
from cstorch.optim.scheduler_base import Tags


class Constant(lr_scheduler.ConstantLR):
    def __init__(self, optimizer: torch.optim.Optimizer, learning_rate: float, total_iters: int | None = None, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class Polynomial(lr_scheduler.PolynomialLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, end_learning_rate: float, total_iters: int, power: float = 1.0, cycle: bool = False, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class Exponential(lr_scheduler.ExponentialLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, total_iters: int, decay_rate: float, staircase: bool = False, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class InverseExponentialTimeDecay(lr_scheduler.InverseExponentialTimeDecayLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, step_exponent: int, total_iters: int, decay_rate: float, staircase: bool = False, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class InverseSquareRootDecay(lr_scheduler.InverseSquareRootDecayLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float = 1.0, scale: float = 1.0, warmup_steps: int = 1, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class CosineDecay(lr_scheduler.CosineDecayLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, end_learning_rate: float, total_iters: int, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class CosineAnnealing(lr_scheduler.CosineAnnealingLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, T_max: int, eta_min: float = 0.0, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class CosineAnnealingWarmRestarts(lr_scheduler.CosineAnnealingWarmRestarts):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class MultiStep(lr_scheduler.MultiStepLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, gamma: float, milestones: list[int], disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class Lambda(lr_scheduler.LambdaLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class Multiplicative(lr_scheduler.MultiplicativeLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, coefficient: float, disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class CyclicLR(lr_scheduler.CyclicLR):
    def __init__(self, optimizer: torch.optim.Optimizer, base_lr: float, max_lr: float, step_size_up: int = 2000, step_size_down: int | None = None, mode: str = 'triangular', gamma: float = 1.0, scale_mode: str = 'cycle', disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class OneCycleLR(lr_scheduler.OneCycleLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, max_lr: float, total_steps: int = 1000, pct_start: float = 0.3, final_div_factor: float = 10000.0, three_phase: bool = False, anneal_strategy: str = 'cos', disable_lr_steps_reset: bool = False, param_group_tags: Tags = None) -> None: ...

class ScalePerParamLR(lr_scheduler.ScalePerParamLR):
    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, decay_steps: int | None=None, disable_lr_steps_reset: bool=False, param_group_tags: Tags=None) -> None: ...

class Step(lr_scheduler.StepLR):
    def __init__(self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, gamma: float, step_size: int, disable_lr_steps_reset: bool=False) -> None: ...

def __getattr__(name: str) -> Any: ...
