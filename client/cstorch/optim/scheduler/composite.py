"""The base class of schedules that are made of schedules."""

from collections.abc import Mapping
from typing import Any

import torch

from cstorch.optim.scheduler.base import Scheduler, Tags, own_optimizer


class CompositeScheduler(Scheduler):
    """Computes its value from those of other schedules, which only count and compute from then on."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedulers: list[Scheduler],
        last_epoch: int = -1,
        param_group_tags: Tags = None,
    ) -> None:
        for scheduler in schedulers:
            if scheduler.optimizer is not optimizer:
                raise ValueError(f"all schedulers of a {type(self).__name__} must have its optimizer")
            if scheduler.has_values_of_groups:
                raise ValueError(
                    f"{type(scheduler).__name__} gives each group a value of its own, so it cannot be a part of "
                    f"{type(self).__name__}: put it around"
                )
        self._schedulers = list(schedulers)
        known = own_optimizer(optimizer, self).schedulers
        known[:] = [schedule for schedule in known if schedule not in self._schedulers]
        super().__init__(optimizer, None, last_epoch, param_group_tags)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._parts_dict()}

    def _parts_dict(self) -> dict[str, Any]:
        return {"_schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        own = dict(state_dict)
        saved = [own.pop(name) for name in ("_schedulers", "schedulers", "_scheduler") if name in own]
        parts = saved[0] if len(saved) == 1 else ()
        parts = [parts] if isinstance(parts, Mapping) else parts
        if len(parts) != len(self._schedulers):
            raise ValueError(
                f"the loaded state has {len(parts)} schedulers, this {type(self).__name__} {len(self._schedulers)}"
            )
        for scheduler, part in zip(self._schedulers, parts, strict=True):
            scheduler.load_state_dict(part)
        super().load_state_dict(own)
