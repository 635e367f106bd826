"""Schedules of any setting of a parameter group, as closed forms of a step counter that is computed in the step."""

from cstorch.optim.scheduler.base import Scheduler
from cstorch.optim.scheduler.chained import ChainedScheduler, ScalePerParamScheduler
from cstorch.optim.scheduler.cosine import (
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineDecayScheduler,
)
from cstorch.optim.scheduler.cycles import CyclicScheduler, OneCycleScheduler
from cstorch.optim.scheduler.forms import (
    ConstantScheduler,
    ExponentialScheduler,
    LinearScheduler,
    MultiStepScheduler,
    PolynomialScheduler,
    StepScheduler,
)
from cstorch.optim.scheduler.inverse import InverseExponentialTimeDecayScheduler, InverseSquareRootDecayScheduler
from cstorch.optim.scheduler.lambdas import LambdaScheduler, MultiplicativeScheduler
from cstorch.optim.scheduler.sequential import PiecewiseConstantScheduler, SequentialScheduler

__all__ = [
    "ChainedScheduler",
    "ConstantScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineDecayScheduler",
    "CyclicScheduler",
    "ExponentialScheduler",
    "InverseExponentialTimeDecayScheduler",
    "InverseSquareRootDecayScheduler",
    "LambdaScheduler",
    "LinearScheduler",
    "MultiStepScheduler",
    "MultiplicativeScheduler",
    "OneCycleScheduler",
    "PiecewiseConstantScheduler",
    "PolynomialScheduler",
    "ScalePerParamScheduler",
    "Scheduler",
    "SequentialScheduler",
    "StepScheduler",
]
