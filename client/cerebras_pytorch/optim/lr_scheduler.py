"""The schedules of releases 1.6 to 1.9: under their older names, and with one more argument behind the others.

It is `disable_lr_steps_reset`, which changes nothing: schedules count the steps of the optimizer and are never reset.
"""

from typing import Any

from cstorch._internal.generations import inherit
from cstorch.optim import lr_scheduler

__all__ = [
    "Constant",
    "CosineAnnealing",
    "CosineAnnealingWarmRestarts",
    "CosineDecay",
    "CyclicLR",
    "Exponential",
    "InverseExponentialTimeDecay",
    "InverseSquareRootDecay",
    "Lambda",
    "MultiStep",
    "Multiplicative",
    "OneCycleLR",
    "Polynomial",
    "ScalePerParamLR",
    "Step",
]

__getattr__ = inherit("cerebras_pytorch.optim.lr_scheduler", "cstorch.optim.lr_scheduler")


class Constant(lr_scheduler.ConstantLR):
    """cstorch.optim.lr_scheduler.ConstantLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:2], **_without_reset(kwargs))


class Polynomial(lr_scheduler.PolynomialLR):
    """cstorch.optim.lr_scheduler.PolynomialLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:5], **_without_reset(kwargs))


class Exponential(lr_scheduler.ExponentialLR):
    """cstorch.optim.lr_scheduler.ExponentialLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:4], **_without_reset(kwargs))


class InverseExponentialTimeDecay(lr_scheduler.InverseExponentialTimeDecayLR):
    """cstorch.optim.lr_scheduler.InverseExponentialTimeDecayLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:5], **_without_reset(kwargs))


class InverseSquareRootDecay(lr_scheduler.InverseSquareRootDecayLR):
    """cstorch.optim.lr_scheduler.InverseSquareRootDecayLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:3], **_without_reset(kwargs))


class CosineDecay(lr_scheduler.CosineDecayLR):
    """cstorch.optim.lr_scheduler.CosineDecayLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:3], **_without_reset(kwargs))


class CosineAnnealing(lr_scheduler.CosineAnnealingLR):
    """cstorch.optim.lr_scheduler.CosineAnnealingLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:3], **_without_reset(kwargs))


class MultiStep(lr_scheduler.MultiStepLR):
    """cstorch.optim.lr_scheduler.MultiStepLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:3], **_without_reset(kwargs))


class Lambda(lr_scheduler.LambdaLR):
    """cstorch.optim.lr_scheduler.LambdaLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:1], **_without_reset(kwargs))


class Multiplicative(lr_scheduler.MultiplicativeLR):
    """cstorch.optim.lr_scheduler.MultiplicativeLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:2], **_without_reset(kwargs))


class CosineAnnealingWarmRestarts(lr_scheduler.CosineAnnealingWarmRestarts):
    """cstorch.optim.lr_scheduler.CosineAnnealingWarmRestarts."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:4], **_without_reset(kwargs))


class CyclicLR(lr_scheduler.CyclicLR):
    """cstorch.optim.lr_scheduler.CyclicLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:7], **_without_reset(kwargs))


class OneCycleLR(lr_scheduler.OneCycleLR):
    """cstorch.optim.lr_scheduler.OneCycleLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:7], **_without_reset(kwargs))


class ScalePerParamLR(lr_scheduler.ScalePerParamLR):
    """cstorch.optim.lr_scheduler.ScalePerParamLR."""

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args[:1], **_without_reset(kwargs))


class Step(lr_scheduler.StepLR):
    """cstorch.optim.lr_scheduler.StepLR, whose arguments stand in another order."""

    def __init__(
        self,
        optimizer: Any,
        initial_learning_rate: float,
        gamma: float,
        step_size: int,
        disable_lr_steps_reset: bool = False,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, step_size, gamma)


def _without_reset(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "disable_lr_steps_reset"}
