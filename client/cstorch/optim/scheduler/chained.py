"""Schedules multiplied, and schedules scaled."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from cstorch.optim.scheduler.base import Scheduler, Tags
from cstorch.optim.scheduler.composite import CompositeScheduler


class ChainedScheduler(CompositeScheduler):
    """The first schedule's value, times `value / initial value` of each other one."""

    def __init__(self, schedulers: list[Scheduler], param_group_tags: Tags = None) -> None:
        if not schedulers:
            raise ValueError("a chain needs at least one scheduler")
        for scheduler in schedulers[1:]:
            if not getattr(scheduler, "initial_val", 0):
                raise ValueError(
                    f"{type(scheduler).__name__} has no initial value, or 0: it can only be the first of a chain, "
                    "as the others are divided by theirs"
                )
        super().__init__(schedulers[0].optimizer, schedulers, param_group_tags=param_group_tags)

    def _advance(self, by: int | torch.Tensor) -> None:
        super()._advance(by)
        for scheduler in self._schedulers:
            scheduler._advance(by)

    def _get_closed_form(self) -> torch.Tensor:
        first, *others = self._schedulers
        value = first.get()
        for scheduler in others:
            value = value * (scheduler.get() / scheduler.initial_val)  # type: ignore[attr-defined]
        return value


class ScalePerParamScheduler(CompositeScheduler):
    """The scheduler's value, for each parameter group times its "adjust_learning_rate" (1 where it has none)."""

    has_values_of_groups = True
    _scalars_name: ClassVar[str] = "adjustment_scalars"  # by which they are saved

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Scheduler, param_group_tags: Tags = None) -> None:
        super().__init__(optimizer, [scheduler], param_group_tags=param_group_tags)

    @property
    def adjustment_scalars(self) -> list[float]:
        """The factor of each parameter group."""
        return [_factor(group) for group in self.optimizer.param_groups]

    def _advance(self, by: int | torch.Tensor) -> None:
        super()._advance(by)
        self._schedulers[0]._advance(by)

    def _get_closed_form(self) -> torch.Tensor:
        return self._schedulers[0].get()

    def _parts_dict(self) -> dict[str, Any]:
        return {"_scheduler": self._schedulers[0].state_dict(), self._scalars_name: self.adjustment_scalars}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        own = dict(state_dict)
        scalars = own.pop(self._scalars_name, self.adjustment_scalars)
        if list(scalars) != self.adjustment_scalars:
            raise ValueError(
                f"the loaded state scales the parameter groups by {list(scalars)}, these have {self.adjustment_scalars}"
            )
        super().load_state_dict(own)

    def _value_for(self, group: Mapping[str, Any], value: Any) -> Any:
        return value * _factor(group)


def _factor(group: Mapping[str, Any]) -> float:
    return float(group.get("adjust_learning_rate", 1.0))
