"""Learning rate schedules: the forms of cstorch.optim.scheduler, with learning rate names, writing `group["lr"]`."""

from collections.abc import Sequence
from typing import Any

import torch

from cstorch.optim.optimizer import Optimizer
from cstorch.optim.scheduler import (
    ConstantScheduler,
    CosineDecayScheduler,
    ExponentialScheduler,
    LinearScheduler,
    MultiStepScheduler,
    PolynomialScheduler,
    Scheduler,
    SequentialScheduler,
    StepScheduler,
)
from cstorch.optim.scheduler.base import Tags

__all__ = [
    "ConstantLR",
    "CosineDecayLR",
    "ExponentialLR",
    "LRScheduler",
    "LinearLR",
    "MultiStepLR",
    "PolynomialLR",
    "SequentialLR",
    "StepLR",
]


class LRScheduler(Scheduler):
    """A schedule of the learning rate. A subclass gives the whole schedule as a tensor: `_get_closed_form_lr`."""

    @property
    def param_group_key(self) -> str:
        """The learning rate."""
        return "lr"

    def get_last_lr(self) -> list[Any]:
        """The learning rate evaluated last, for each parameter group: numbers, in a traced step tensors."""
        return [self.get_last_value()] * len(self.optimizer.param_groups)

    def get_lr(self) -> list[torch.Tensor]:
        """The learning rate for the current epoch, for each parameter group, as tensors."""
        return [self.get()] * len(self.optimizer.param_groups)

    def _get_closed_form(self) -> torch.Tensor:
        return self._get_closed_form_lr()

    def _get_closed_form_lr(self) -> torch.Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} must define _get_closed_form_lr(self): "
            "the learning rate as a tensor computed from self.last_epoch"
        )


class ConstantLR(ConstantScheduler, LRScheduler):
    """learning_rate, always."""

    def __init__(
        self,
        optimizer: Optimizer,
        learning_rate: float,
        total_iters: int | None = None,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, learning_rate, total_iters, param_group_tags)


class PolynomialLR(PolynomialScheduler, LRScheduler):
    """`(initial - end) * (1 - e / T)^power + end`, and end from T on; with cycle starting again at multiples of T."""

    def __init__(
        self,
        optimizer: Optimizer,
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

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        cycle: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, end_learning_rate, total_iters, cycle, param_group_tags)


class ExponentialLR(ExponentialScheduler, LRScheduler):
    """`initial * decay_rate^(e / T)`; with staircase the exponent is rounded down."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float,
        total_iters: int,
        decay_rate: float,
        staircase: bool = False,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, total_iters, decay_rate, staircase, param_group_tags)


class CosineDecayLR(CosineDecayScheduler, LRScheduler):
    """`end + (initial - end) * (1 + cos(pi * min(e, T) / T)) / 2`."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float,
        end_learning_rate: float,
        total_iters: int,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, end_learning_rate, total_iters, param_group_tags)


class StepLR(StepScheduler, LRScheduler):
    """`initial * gamma^floor(e / step_size)`."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float,
        step_size: int,
        gamma: float,
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, step_size, gamma, param_group_tags)


class MultiStepLR(MultiStepScheduler, LRScheduler):
    """`initial * gamma^n`, n the number of milestones that are at most e."""

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float,
        gamma: float,
        milestones: Sequence[int],
        param_group_tags: Tags = None,
    ) -> None:
        super().__init__(optimizer, initial_learning_rate, gamma, milestones, param_group_tags)


class SequentialLR(SequentialScheduler, LRScheduler):
    """schedulers[i] up to milestones[i] (exclusive), then the next from its own epoch 0."""
