"""Learning rate schedules: the forms of cstorch.optim.scheduler, with learning rate names, writing `group["lr"]`."""

from typing import Any

import torch

from cstorch.optim.scheduler import ChainedScheduler as BaseChainedScheduler
from cstorch.optim.scheduler import (
    ConstantScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineDecayScheduler,
    CyclicScheduler,
    ExponentialScheduler,
    InverseExponentialTimeDecayScheduler,
    InverseSquareRootDecayScheduler,
    LambdaScheduler,
    LinearScheduler,
    MultiplicativeScheduler,
    MultiStepScheduler,
    OneCycleScheduler,
    PiecewiseConstantScheduler,
    PolynomialScheduler,
    ScalePerParamScheduler,
    Scheduler,
    SequentialScheduler,
    StepScheduler,
)
from cstorch.optim.scheduler_base import Renamed, Tags

# --- The base class of learning rate schedules ------------------------------------------------------------------------


class LRScheduler(Scheduler):
    """A schedule of the learning rate. A subclass gives the whole schedule as a tensor: `_get_closed_form_lr`."""

    @property
    def param_group_key(self) -> str:
        """The learning rate."""
        return "lr"

    def get_last_lr(self) -> list[Any]:
        """The learning rate evaluated last, for each parameter group: numbers, in a traced step tensors."""
        value = self.get_last_value()
        return [self._value_for(group, value) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[torch.Tensor]:
        """The learning rate for the current epoch, for each parameter group, as tensors."""
        value = self.get()
        return [self._value_for(group, value) for group in self.optimizer.param_groups]

    def _get_closed_form(self) -> torch.Tensor:
        return self._get_closed_form_lr()

    def _get_closed_form_lr(self) -> torch.Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} must define _get_closed_form_lr(self): "
            "the learning rate as a tensor computed from self.last_epoch"
        )


# --- Learning rates that fall. e = last_epoch, T = total_iters --------------------------------------------------------


class ConstantLR(ConstantScheduler, LRScheduler):
    """learning_rate, always."""

    learning_rate = Renamed("val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rate: float,
        total_iters: int | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, learning_rate, total_iters, param_group_tags)


class PolynomialLR(PolynomialScheduler, LRScheduler):
    """`(initial - end) * (1 - e / T)^power + end`, and end from T on; with cycle starting again at multiples of T."""

    initial_learning_rate = Renamed("initial_val")
    end_learning_rate = Renamed("end_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        power: float = 1.0,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(
            optimizer, initial_learning_rate, end_learning_rate, total_iters, power, cycle, param_group_tags
        )


class LinearLR(LinearScheduler, LRScheduler):
    """From initial to end in T equal steps, then end."""

    initial_learning_rate = Renamed("initial_val")
    end_learning_rate = Renamed("end_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, end_learning_rate, total_iters, cycle, param_group_tags)


class ExponentialLR(ExponentialScheduler, LRScheduler):
    """`initial * decay_rate^(e / T)`; with staircase the exponent is rounded down."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, total_iters, decay_rate, staircase, param_group_tags)


class StepLR(StepScheduler, LRScheduler):
    """`initial * gamma^floor(e / step_size)`."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        step_size: int,
        gamma: float,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, step_size, gamma, param_group_tags)


class MultiStepLR(MultiStepScheduler, LRScheduler):
    """`initial * gamma^n`, n the number of milestones that are at most e."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        gamma: float,
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, gamma, milestones, param_group_tags)


class InverseExponentialTimeDecayLR(InverseExponentialTimeDecayScheduler, LRScheduler):
    """`initial / (1 + decay_rate * e^step_exponent / T)`; with staircase `e^step_exponent / T` is rounded down."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        step_exponent: int,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(
            optimizer, initial_learning_rate, step_exponent, total_iters, decay_rate, staircase, param_group_tags
        )


class InverseSquareRootDecayLR(InverseSquareRootDecayScheduler, LRScheduler):
    """`initial * scale / sqrt(max(warmup_steps, e))`."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float = 1.0,
        scale: float = 1.0,
        warmup_steps: int = 1,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, scale, warmup_steps, param_group_tags)


# --- Learning rates that follow a cosine, or rise and fall. e = last_epoch, T = total_iters ---------------------------


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


# --- Learning rates made of others, or of functions. e = last_epoch ---------------------------------------------------


class SequentialLR(SequentialScheduler, LRScheduler):
    """schedulers[i] up to milestones[i] (exclusive), then the next from its own epoch 0."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: list[LRScheduler],
        milestones: list[int],
        last_epoch: int = -1,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, [*schedulers], milestones, last_epoch, param_group_tags)


class PiecewiseConstantLR(PiecewiseConstantScheduler, LRScheduler):
    """learning_rates[i] up to milestones[i] (exclusive), then the next."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learning_rates: list[float],
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, ConstantLR, learning_rates, milestones, param_group_tags)


class ChainedLR(BaseChainedScheduler, LRScheduler):
    """The first schedule's value, times `value / initial value` of each other one."""

    def __init__(self, schedulers: list[LRScheduler], param_group_tags: Tags = None) -> None:
        super().__init__([*schedulers], param_group_tags)


class ChainedScheduler(ChainedLR):
    """A ChainedLR, by the name that torch has for it."""


class ScalePerParamLR(ScalePerParamScheduler, LRScheduler):
    """The scheduler's value, for each parameter group times its "adjust_learning_rate" (1 where it has none)."""

    _scalars_name = "lr_adjustment_scalars"

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, param_group_tags: Tags = None) -> None:
        super().__init__(optimizer, scheduler, param_group_tags)


class LambdaLR(LambdaScheduler, LRScheduler):
    """The product of `initial * f(e)`, for each function f that `set_value_lambda`, to be overridden, returns."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self, optimizer: torch.optim.Optimizer, initial_learning_rate: float, param_group_tags: Tags = None
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, param_group_tags)


class MultiplicativeLR(MultiplicativeScheduler, LRScheduler):
    """`initial * coefficient^e`; a subclass may compute the coefficient from e: `set_value_lambda`."""

    initial_learning_rate = Renamed("initial_val")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        initial_learning_rate: float,
        coefficient: float,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, coefficient, param_group_tags)


__all__ = [
    "BaseChainedScheduler",
    "ChainedLR",
    "ChainedScheduler",
    "ConstantLR",
    "ConstantScheduler",
    "CosineAnnealingLR",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestarts",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineDecayLR",
    "CosineDecayScheduler",
    "CyclicLR",
    "CyclicScheduler",
    "ExponentialLR",
    "ExponentialScheduler",
    "InverseExponentialTimeDecayLR",
    "InverseExponentialTimeDecayScheduler",
    "InverseSquareRootDecayLR",
    "InverseSquareRootDecayScheduler",
    "LRScheduler",
    "LambdaLR",
    "LambdaScheduler",
    "LinearLR",
    "LinearScheduler",
    "MultiStepLR",
    "MultiStepScheduler",
    "MultiplicativeLR",
    "MultiplicativeScheduler",
    "OneCycleLR",
    "OneCycleScheduler",
    "PiecewiseConstantLR",
    "PiecewiseConstantScheduler",
    "PolynomialLR",
    "PolynomialScheduler",
    "ScalePerParamLR",
    "ScalePerParamScheduler",
    "Scheduler",
    "SequentialLR",
    "SequentialScheduler",
    "StepLR",
    "StepScheduler",
]
