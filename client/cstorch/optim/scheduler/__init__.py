"""Schedules of any setting of a parameter group, as closed forms of a step counter that is computed in the step."""

from cstorch.optim.scheduler.base import Scheduler
from cstorch.optim.scheduler.forms import (
    ConstantScheduler,
    CosineDecayScheduler,
    ExponentialScheduler,
    LinearScheduler,
    MultiStepScheduler,
    PolynomialScheduler,
    StepScheduler,
)
from cstorch.optim.scheduler.sequential import SequentialScheduler

__all__ = [
    "ConstantScheduler",
    "CosineDecayScheduler",
    "ExponentialScheduler",
    "LinearScheduler",
    "MultiStepScheduler",
    "PolynomialScheduler",
    "Scheduler",
    "SequentialScheduler",
    "StepScheduler",
]
