"""The base classes of schedules, and the maker of the classes that are made from a table."""

import inspect
import re
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

from cstorch._internal import state
from cstorch._internal.execution import current_execution
from cstorch._internal.tracing import is_of_step
from cstorch._internal.tracing.context import is_tracing, repeat
from cstorch.core.closures import step_closure
from cstorch.optim.optimizer import Optimizer

Tags = str | list[str | None] | None

# Saved by the real system, of this release or of older ones, and computed again here.
_NOT_LOADED: Final = frozenset(
    {"_get_called_within_step", "_get_lr_called_within_step", "_last_lr", "_last_value", "_step_count", "base_lrs"}
)


class Scheduler(ABC):
    """The base class of schedules: one setting of an optimizer's parameter groups, as a tensor computed from the epoch.

    `last_epoch` (int64, rank 0) is state: a traced step advances it and evaluates the formula inside the graph. The
    t-th update (from 0) uses the value of epoch t, whether `step` is called before or after the optimizer's own step.
    A subclass overrides `param_group_key` and `_get_closed_form`. Used by one thread.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        total_iters: The number of steps that the schedule is made for; None: no end.
        last_epoch: The epoch before the first one.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        TypeError: The optimizer is none of `cstorch.optim`.
        ValueError: A tag is given twice, or no group has one.

    Reference: release 2.10, `cerebras.pytorch.optim.scheduler`.
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
        # In lists: tensor attributes of a scheduler are loop-carried state.
        self._last_value: list[torch.Tensor] = []
        self._known_value: list[torch.Tensor] = []  # the last that was no tensor of a step
        self.optimizer.schedulers.append(self)
        state.register("scheduler", self)
        self.update_last_value()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_is_of_optimizer": self in self.optimizer.schedulers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes a copy, and adds it to the copied optimizer, unless it is a part of another schedule."""
        is_of_optimizer = state.pop("_is_of_optimizer")
        vars(self).update(state)
        if is_of_optimizer:
            self.optimizer.schedulers.append(self)

    @property
    @abstractmethod
    def param_group_key(self) -> str:
        """The setting of the parameter groups that this schedule writes."""

    @abstractmethod
    def _get_closed_form(self) -> torch.Tensor:
        """The value for `self.last_epoch` (rank 0, float32), without Python decisions on tensors."""

    def get(self) -> torch.Tensor:
        """Returns the value for the current epoch (rank 0, float32)."""
        with torch.no_grad():
            return self._get_closed_form()

    def step(self) -> None:
        """Advances to the next epoch and writes its value. To be called once in every traced step."""
        self.increment_last_epoch()
        self.update_last_value()

    def increment_last_epoch(self) -> None:
        """Adds one to the counter, without evaluating the formula."""
        self._advance(1)

    def _advance(self, by: int | torch.Tensor) -> None:
        self.last_epoch.add_(by)

    def update_last_value(self) -> None:
        """Evaluates the formula and writes the groups; after a traced step has run they hold numbers."""
        value = self.get()
        repeat(lambda: self.update_groups(value))
        step_closure(self.update_groups)(value)

    def write_to_groups(self) -> None:
        """Writes the value for the current epoch into the groups, as a tensor of the step."""
        value = self.get()
        repeat(lambda: self.update_groups(value))

    def update_groups(self, value: torch.Tensor) -> None:
        """Writes a value into the groups of this schedule.

        Args:
            value: The value, of rank 0.
        """
        self._last_value = [value]
        if not is_of_step(value):
            self._known_value = [value]
        for group in self.optimizer.param_groups:
            if self._applies_to(group):
                group[self.param_group_key] = self._value_for(group, value)

    def _value_for(self, group: Mapping[str, Any], value: Any) -> Any:
        """Returns the value of one group: here the schedule's own."""
        return value

    def put_back(self) -> None:
        """Writes the last number into the groups, in place of a tensor of a step that does not count."""
        if is_of_step(self._last_value[0]):
            self.update_groups(self._known_value[0])

    def settle(self) -> None:
        """Writes the number for the current epoch into the groups, if they have a tensor of a step.

        They have one after a loop that was left on a step without outputs. No effect in a loop, whose next step writes
        them.
        """
        if is_of_step(self._last_value[0]) and current_execution() is None and not is_tracing():
            self.update_groups(self.get().cpu())

    def get_last_value(self) -> Any:
        """Returns the value evaluated last: a number, or a tensor within a traced step and after it in the loop."""
        self.settle()
        value = self._last_value[0]
        return value if is_tracing() or is_of_step(value) else float(value)

    def _applies_to(self, group: Mapping[str, Any]) -> bool:
        if self.param_group_tags is None:
            return True
        tags = group.get("tags") or None
        own = {tags} if tags is None or isinstance(tags, str) else set(tags)
        return not own.isdisjoint(self.param_group_tags)

    def state_dict(self) -> dict[str, Any]:
        """Returns the counter and the settings, under the names in which the real system saves them."""
        names = {kept: name for name, kept in self._other_names().items()}
        own = {name: value for name, value in vars(self).items() if name != "optimizer" and not name.startswith("_")}
        return {
            **{names.get(name, name): value for name, value in own.items()},
            "_last_value": [self._value_for(group, self.get_last_value()) for group in self.optimizer.param_groups],
            "_step_count": int(self.last_epoch) + 1,
            "_get_called_within_step": False,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the counter and the settings. The counter stays the same tensor.

        Args:
            state_dict: A saved state. Its names are this schedule's (`end_learning_rate`) or general (`end_val`).

        Raises:
            ValueError: A setting is none of this schedule, or there is no counter; nothing is changed.
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
        """Returns the attributes that keep the settings, by the other names of the settings."""
        found = (attribute for kind in cls.__mro__ for attribute in vars(kind).items())
        return {name: attribute.name for name, attribute in found if isinstance(attribute, Renamed)}


class Renamed(property):
    """An attribute of a schedule under another name, in which it is saved."""

    def __init__(self, name: str) -> None:
        super().__init__(self._read, self._write)
        self.name = name

    def _read(self, schedule: Scheduler) -> Any:
        return getattr(schedule, self.name)

    def _write(self, schedule: Scheduler, value: Any) -> None:
        setattr(schedule, self.name, value)


def own_optimizer(optimizer: torch.optim.Optimizer, scheduler: Scheduler) -> Optimizer:
    """Returns the optimizer. Raises TypeError unless it is one of ours: torch's own read the rate as a number."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{type(scheduler).__name__} takes a cstorch.optim.Optimizer, not {type(optimizer).__name__}: "
            "the learning rate must stay a tensor, which torch's own optimizers read as a number"
        )
    return optimizer


def _tags(tags: Tags) -> set[str | None] | None:
    if tags is None:
        return None
    if not isinstance(tags, Iterable):
        raise TypeError(f"param_group_tags takes a tag of the optimizer's groups, or a list of them, not {tags!r}")
    listed: list[str | None] = [tags] if isinstance(tags, str) else list(tags)
    if len(set(listed)) != len(listed):
        raise ValueError(f"param_group_tags has a tag twice: {listed}")
    return set(listed)


def check_positive(name: str, value: int) -> None:
    """Raises ValueError unless the value is at least 1."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


# --- Schedules made of schedules --------------------------------------------------------------------------------------


class CompositeScheduler(Scheduler):
    """The base class of schedules whose value is computed from others, which no longer write groups themselves.

    Args:
        optimizer: The `cstorch.optim.Optimizer` whose parameter groups are written.
        schedulers: The other schedules, all of this optimizer.
        last_epoch: The epoch before the first one.
        param_group_tags: Tag or tags of the groups to write, None among them for groups without; None: all groups.

    Raises:
        ValueError: A schedule has another optimizer, or scales the groups itself.
    """

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


# --- Classes of schedules that are made from a table ------------------------------------------------------------------


def derived(
    form: type[Scheduler],
    base: type[Scheduler],
    name: str,
    module: str,
    *,
    names: Mapping[str, str] | None = None,
    unkept: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    annotations: Mapping[str, Any] | None = None,
    members: Mapping[str, Any] | None = None,
) -> type[Any]:
    """Makes the class that has the formula of one schedule and writes the setting of another.

    The module must bind the class under its own name, so that it can be pickled.

    Args:
        form: The class with the formula.
        base: The class with the setting.
        name: The name of the new class.
        module: The module that binds it: `__name__`.
        names: The parameters of the form that have another name, which is also that of the attribute and in states.
        unkept: The same for parameters that the form does not keep as attributes.
        fixed: The parameters of the form that are given here and are none of the new class.
        annotations: The parameters whose type is not that of the form.
        members: More members of the class.

    Returns:
        A class with the bases `form` and `base`, the form's docstring, and a signature of its own.
    """
    fixed, annotations = fixed or {}, annotations or {}
    form_parameters = inspect.signature(form.__init__).parameters
    kept = {general: own for general, own in (names or {}).items() if general in form_parameters}
    own_names = {**kept, **(unkept or {})}
    general_names = {own: general for general, own in own_names.items()}
    parameters = [
        parameter.replace(
            name=own_names.get(general, general), annotation=annotations.get(general, parameter.annotation)
        )
        for general, parameter in form_parameters.items()
        if general not in fixed
    ]
    signature = inspect.Signature(parameters, return_annotation=None)

    def __init__(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        given = bound(signature, self, args, kwargs)
        # By its name, not by super(): a subclass's MRO puts its own classes before the form.
        form.__init__(self, **{general_names.get(own, own): value for own, value in given.items()}, **fixed)

    text = _without(fixed, inspect.cleandoc(form.__doc__ or ""))
    text = re.sub(r"\w+", lambda word: own_names.get(word[0], word[0]), text)
    text = text.replace(_reference(form.__module__), _reference(module))
    namespace = {
        **{own: Renamed(general) for general, own in kept.items()},
        **(members or {}),
        "__init__": with_signature(__init__, signature, name, module),
        "__doc__": text,
        "__module__": module,
    }
    return types.new_class(name, (form, base), exec_body=lambda body: body.update(namespace))


def bound(
    signature: inspect.Signature, schedule: Scheduler, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a constructor by name, without `self`. Raises TypeError, as a call does."""
    try:
        given = signature.bind(schedule, *args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{type(schedule).__name__}: {error}") from None
    return {name: value for name, value in given.items() if name != "self"}


def with_signature(function: Any, signature: inspect.Signature, owner: str, module: str) -> Any:
    """Returns the constructor of a made class, with the signature, annotations and names that a written one has."""
    function.__signature__ = signature
    function.__annotations__ = {name: each.annotation for name, each in signature.parameters.items() if name != "self"}
    function.__annotations__["return"] = None
    function.__module__, function.__qualname__ = module, f"{owner}.__init__"
    return function


def _reference(module: str) -> str:
    """Returns the line of a docstring that names the page of the reference."""
    return f"Reference: release 2.10, `{module.replace('cstorch', 'cerebras.pytorch', 1)}`."


def _without(parameters: Iterable[str], text: str) -> str:
    """Returns a docstring without the entries of these parameters."""
    for name in parameters:
        text = re.sub(rf"^    {name}:.*\n(        .*\n)*", "", text, flags=re.MULTILINE)
    return text
