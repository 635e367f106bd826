"""One schedule after the other."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cstorch.optim.optimizer import Optimizer
from cstorch.optim.scheduler.base import Scheduler, Tags


class SequentialScheduler(Scheduler):
    """schedulers[i] up to milestones[i] (exclusive), then the next, which starts at its own epoch 0 there."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[Scheduler],
        milestones: Sequence[int],
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
        for scheduler in schedulers:
            if scheduler.optimizer is not optimizer:
                raise ValueError("all schedulers of a sequence must have the optimizer of the sequence")
        self._schedulers = list(schedulers)
        self.milestones = list(milestones)
        # From now on the parts only count and compute; the sequence writes the groups.
        optimizer.schedulers[:] = [known for known in optimizer.schedulers if known not in self._schedulers]
        super().__init__(optimizer, None, last_epoch, param_group_tags)

    def increment_last_epoch(self) -> None:
        super().increment_last_epoch()
        first, *others = self._schedulers
        first.increment_last_epoch()
        for scheduler, milestone in zip(others, self.milestones, strict=True):
            scheduler.last_epoch.add_((self.last_epoch > milestone).to(torch.int64))

    def _get_closed_form(self) -> torch.Tensor:
        value = self._schedulers[0].get()
        for scheduler, milestone in zip(self._schedulers[1:], self.milestones, strict=True):
            value = torch.where(self.last_epoch < milestone, value, scheduler.get())
        return value

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        own = dict(state_dict)
        parts = own.pop("schedulers")
        if len(parts) != len(self._schedulers):
            raise ValueError(f"the loaded state has {len(parts)} schedulers, this sequence {len(self._schedulers)}")
        for scheduler, part in zip(self._schedulers, parts, strict=True):
            scheduler.load_state_dict(part)
        super().load_state_dict(own)
