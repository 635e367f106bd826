"""The base class of every schedule, and of those that are made of schedules."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from cstorch._internal import state
from cstorch._internal.tracing import is_of_step
from cstorch._internal.tracing.context import is_tracing, repeat
from cstorch.core.closures import step_closure
from cstorch.optim.optimizer import Optimizer

# --- The base class of every schedule ---------------------------------------------------------------------------------


Tags = str | list[str | None] | None

# In the saved state of the real system, of this release or of older ones, and computed anew here.
_NOT_LOADED: Final = frozenset(
    {"_get_called_within_step", "_get_lr_called_within_step", "_last_lr", "_last_value", "_step_count", "base_lrs"}
)


class Scheduler(ABC):
    """Computes one setting of an optimizer's parameter groups from `last_epoch`, in tensor operations only.

    `last_epoch` (int64, rank 0) is state: a traced step advances it and evaluates the closed form inside the graph. The
    t-th update (from 0) uses the value for epoch t, whether `step` is called before or after it was evaluated by hand:
    the optimizer evaluates its schedules at the beginning of its own step.

    optimizer: a `cstorch.optim.Optimizer`.
    total_iters: the number of steps that the schedule is made for.
    last_epoch: the last epoch that has been; the constructor goes on to the next.
    param_group_tags: only groups whose "tags" have one of these are written, None among them for groups without; None:
        all groups.

    Raises:
        TypeError: the optimizer is another.
        ValueError: a tag is given twice, or no group has one.
    """

    has_values_of_groups: ClassVar[bool] = False  # whether groups get different values

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_iters: int | None,
        last_epoch: int = -1,
        param_group_tags: Tags = None,
    ) -> None:
        self.optimizer = own_optimizer(optimizer, self)
        self.total_iters: Any = total_iters  # None where the form has no end
        self.param_group_tags = _tags(param_group_tags)
        if not any(self._applies_to(group) for group in self.optimizer.param_groups):
            raise ValueError(f"no parameter group has one of the tags {self.param_group_tags}, so nothing is scheduled")
        device = self.optimizer.parameters()[0].device
        self.last_epoch = torch.full((), last_epoch + 1, dtype=torch.int64, device=device)
        self._last_value: list[torch.Tensor] = []  # in a list: tensor attributes of a scheduler are loop-carried state
        self.optimizer.schedulers.append(self)
        state.register("scheduler", self)
        self.update_last_value()

    @property
    @abstractmethod
    def param_group_key(self) -> str:
        """The setting of the parameter groups that this schedule writes."""

    @abstractmethod
    def _get_closed_form(self) -> torch.Tensor:
        """The value for `self.last_epoch` (rank 0, float32), without Python decisions on tensors."""

    def get(self) -> torch.Tensor:
        """The value for the current epoch."""
        with torch.no_grad():
            return self._get_closed_form()

    def step(self) -> None:
        """Go on to the next epoch. To be called once in every traced step."""
        self.increment_last_epoch()
        self.update_last_value()

    def increment_last_epoch(self) -> None:
        """Add one to the counter, without evaluating."""
        self._advance(1)

    def _advance(self, by: int | torch.Tensor) -> None:
        self.last_epoch.add_(by)

    def update_last_value(self) -> None:
        """Evaluate, write the groups, and have the number in them when the step has run."""
        value = self.get()
        repeat(lambda: self.update_groups(value))
        step_closure(self.update_groups)(value)

    def write_to_groups(self) -> None:
        """Write the value for the current epoch into the groups, as a tensor of the step."""
        value = self.get()
        repeat(lambda: self.update_groups(value))

    def update_groups(self, value: torch.Tensor) -> None:
        """Write a value into the groups of this schedule."""
        self._last_value = [value]
        for group in self.optimizer.param_groups:
            if self._applies_to(group):
                group[self.param_group_key] = self._value_for(group, value)

    def _value_for(self, group: Mapping[str, Any], value: Any) -> Any:
        """What a group gets where the schedule has a value: the same."""
        return value

    def get_last_value(self) -> Any:
        """The value of the last epoch evaluated: a number; a tensor in a traced step, and behind it in the loop."""
        value = self._last_value[0]
        return value if is_tracing() or is_of_step(value) else float(value)

    def _applies_to(self, group: Mapping[str, Any]) -> bool:
        if self.param_group_tags is None:
            return True
        tags = group.get("tags") or None
        own = {tags} if tags is None or isinstance(tags, str) else set(tags)
        return not own.isdisjoint(self.param_group_tags)

    def state_dict(self) -> dict[str, Any]:
        """The counter and the settings, by the names that the real system saves them by."""
        names = {kept: name for name, kept in self._other_names().items()}
        own = {name: value for name, value in vars(self).items() if name != "optimizer" and not name.startswith("_")}
        return {
            **{names.get(name, name): value for name, value in own.items()},
            "_last_value": [self._value_for(group, self.get_last_value()) for group in self.optimizer.param_groups],
            "_step_count": int(self.last_epoch) + 1,
            "_get_called_within_step": False,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the counter and the settings. The counter keeps its identity.

        A setting may have the name that it has of this schedule, or the general one (`end_learning_rate`, `end_val`).
        Raises ValueError, and changes nothing, where one is of another schedule, or there is no counter.
        """
        settings = {name: value for name, value in state_dict.items() if name not in _NOT_LOADED}
        names = self._other_names()
        if strange := sorted(name for name in settings if names.get(name, name) not in vars(self)):
            raise ValueError(
                f"the loaded state has {', '.join(map(repr, strange))}, which {type(self).__name__} does not have: "
                "was it saved from another schedule?"
            )
        if "last_epoch" not in settings:
            raise ValueError(f"the loaded state has no 'last_epoch', so it is of no {type(self).__name__}")
        with torch.no_grad():
            self.last_epoch.copy_(torch.as_tensor(settings.pop("last_epoch")))
        for name, value in settings.items():
            setattr(self, names.get(name, name), value)
        self.update_last_value()

    @classmethod
    def _other_names(cls) -> dict[str, str]:
        """The attributes that keep the settings, by the other names that these have."""
        found = (attribute for kind in cls.__mro__ for attribute in vars(kind).items())
        return {name: attribute.name for name, attribute in found if isinstance(attribute, Renamed)}


class Renamed(property):
    """An attribute of a schedule by another name, by which it is saved."""

    def __init__(self, name: str) -> None:
        super().__init__(self._read, self._write)
        self.name = name

    def _read(self, schedule: Scheduler) -> Any:
        return getattr(schedule, self.name)

    def _write(self, schedule: Scheduler, value: Any) -> None:
        setattr(schedule, self.name, value)


def own_optimizer(optimizer: torch.optim.Optimizer, scheduler: Scheduler) -> Optimizer:
    """The same. TypeError unless it is one of ours: torch's own read the learning rate as a number."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{type(scheduler).__name__} takes a cstorch.optim.Optimizer, not {type(optimizer).__name__}: "
            "the learning rate must stay a tensor, which torch's own optimizers read as a number"
        )
    return optimizer


def _tags(tags: Tags) -> set[str | None] | None:
    if tags is None:
        return None
    listed: list[str | None] = [tags] if isinstance(tags, str) else list(tags)
    if len(set(listed)) != len(listed):
        raise ValueError(f"param_group_tags has a tag twice: {listed}")
    return set(listed)


def check_positive(name: str, value: int) -> None:
    """ValueError unless it is at least 1."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


# --- The base class of schedules that are made of schedules -----------------------------------------------------------


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
