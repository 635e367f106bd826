"""One schedule after the other."""

import torch

from cstorch.optim.scheduler.base import Renamed, Scheduler, Tags
from cstorch.optim.scheduler.composite import CompositeScheduler


class SequentialScheduler(CompositeScheduler):
    """schedulers[i] up to milestones[i] (exclusive), then the next, which starts at its own epoch 0 there."""

    _milestones = Renamed("milestones")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: list[Scheduler],
        milestones: list[int],
        last_epoch: int = -1,
        param_group_tags: Tags = None,
    ) -> None:
        if not schedulers or len(milestones) != len(schedulers) - 1:
            raise ValueError(
                f"{len(schedulers)} schedulers need {max(len(schedulers) - 1, 1)} milestones in between, "
                f"not {len(milestones)}"
            )
        if list(milestones) != sorted(milestones):
            raise ValueError(f"milestones must increase: {list(milestones)}")
        self.milestones = list(milestones)
        super().__init__(optimizer, schedulers, last_epoch, param_group_tags)

    def _advance(self, by: int | torch.Tensor) -> None:
        super()._advance(by)
        first, *others = self._schedulers
        first._advance(by)
        for scheduler, milestone in zip(others, self.milestones, strict=True):
            scheduler._advance((self.last_epoch > milestone).to(torch.int64) * by)

    def _get_closed_form(self) -> torch.Tensor:
        value = self._schedulers[0].get()
        for scheduler, milestone in zip(self._schedulers[1:], self.milestones, strict=True):
            value = torch.where(self.last_epoch < milestone, value, scheduler.get())
        return value


class PiecewiseConstantScheduler(SequentialScheduler):
    """vals[i] up to milestones[i] (exclusive), then the next. constant_cls: the class that makes a constant of each."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        constant_cls: type[Scheduler],
        vals: list[float],
        milestones: list[int],
        param_group_tags: Tags = None,
    ) -> None:
        constants = [constant_cls(optimizer, val) for val in vals]  # type: ignore[arg-type]
        super().__init__(optimizer, constants, milestones, param_group_tags=param_group_tags)
