"""The base class of learning rate schedules."""

from typing import Any

import torch

from cstorch.optim.scheduler import Scheduler


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
