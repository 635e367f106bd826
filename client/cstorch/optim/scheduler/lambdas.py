"""The schedules that a subclass completes with functions of the epoch. e = last_epoch."""

from collections.abc import Callable, Sequence

import torch

from cstorch.optim.scheduler.base import Scheduler, Tags

Function = Callable[[torch.Tensor], torch.Tensor | float]


class LambdaScheduler(Scheduler):
    """The product of `initial * f(e)`, for each function f that `set_value_lambda` returns."""

    def __init__(self, optimizer: torch.optim.Optimizer, initial_val: float, param_group_tags: Tags = None) -> None:
        self.initial_val = initial_val
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def set_value_lambda(self) -> Sequence[Function]:
        """To be overridden. The functions get the epoch as a tensor (int64, rank 0)."""
        return [lambda epoch: epoch / 30, lambda epoch: torch.pow(0.95, epoch.to(torch.float32))]

    def _get_closed_form(self) -> torch.Tensor:
        value = torch.ones_like(self.last_epoch, dtype=torch.float32)
        for function in self.set_value_lambda():
            value = value * (self.initial_val * function(self.last_epoch))
        return value


class MultiplicativeScheduler(Scheduler):
    """`initial * coefficient^e`; a subclass may compute the coefficient from e: `set_value_lambda`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, initial_val: float, coefficient: float, param_group_tags: Tags = None
    ) -> None:
        self.initial_val = initial_val
        self.coefficient = coefficient
        super().__init__(optimizer, None, param_group_tags=param_group_tags)

    def set_value_lambda(self) -> Function:
        """The function that gives the coefficient."""
        return lambda epoch: float(self.coefficient)

    def _get_closed_form(self) -> torch.Tensor:
        coefficient = self.set_value_lambda()(self.last_epoch)
        return torch.pow(coefficient, self.last_epoch.to(torch.float32)) * self.initial_val
