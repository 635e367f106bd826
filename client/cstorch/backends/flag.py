"""Flags: each has a name in a group, a default, a check of its values, and an effect or a reason to have none."""

import difflib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from cstorch._internal.execution import check_outside_of_loops
from cstorch.errors import ConfigurationError

logger = logging.getLogger("cstorch.backends")

Value = TypeVar("Value")


class Flag(Generic[Value]):
    """One flag of a group.

    Args:
        default: The value until the flag is set.
        check: A function that returns the value to keep, or raises ConfigurationError.
        without_effect: The reason that setting it changes nothing; empty if it has an effect.

    Raises:
        ConfigurationError: `check` refuses the value that is set.
        UsageError: The flag is set inside the loop of an executor.
    """

    def __init__(self, default: Value, check: Callable[[Any], Value], *, without_effect: str = "") -> None:
        self._default = default
        self._check = check
        self._without_effect = without_effect
        self._has_warned = False

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, group: None, owner: type) -> "Flag[Value]": ...
    @overload
    def __get__(self, group: "Flags", owner: type) -> Value: ...
    def __get__(self, group: "Flags | None", owner: type) -> "Flag[Value] | Value":
        if group is None:
            return self
        value: Value = group.values.get(self._name, self._default)
        return value

    def __set__(self, group: "Flags", value: Any) -> None:
        try:
            checked = self._check(value)
        except ConfigurationError as error:
            raise ConfigurationError(f"cstorch.backends.{group.path}.{self._name} {error}, not {value!r}") from None
        check_outside_loop("set flags")
        group.values[self._name] = checked
        if self._without_effect and checked != self._default and not self._has_warned:
            self._has_warned = True
            logger.info("The flag %s.%s has no effect here: %s", group.path, self._name, self._without_effect)

    def __delete__(self, group: "Flags") -> None:
        """Sets the flag to its default."""
        check_outside_loop("set flags")
        group.values.pop(self._name, None)


class Flags:
    """A group of flags, which may hold other groups. `with group(flag=value):` sets flags temporarily.

    Args:
        path: The path of the group below `cstorch.backends`.

    Raises:
        AttributeError: The group has no such flag.
    """

    def __init__(self, path: str) -> None:
        self.__dict__.update(path=path, values={})

    path: str
    values: dict[str, Any]

    if not TYPE_CHECKING:  # type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            raise self._unknown(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if not isinstance(getattr(type(self), name, None), Flag):
                raise self._unknown(name)
            super().__setattr__(name, value)

    def _unknown(self, name: str) -> AttributeError:
        known = [*self.flags(), *self.groups()]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
        return AttributeError(f"cstorch.backends.{self.path} has no flag {name!r}: {hint}")

    def flags(self) -> list[str]:
        """Returns the names of the group's own flags."""
        return [name for name in dir(type(self)) if isinstance(getattr(type(self), name), Flag)]

    def groups(self) -> dict[str, "Flags"]:
        """Returns the groups within, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Flags)}

    @contextmanager
    def __call__(self, **flags: Any) -> Iterator[None]:
        """Sets flags of the group within a `with` block."""
        before = dict(self.values)
        try:
            for name, value in flags.items():
                setattr(self, name, value)
            yield
        finally:
            if self.values != before:
                check_outside_loop("set flags")
                self.values.clear()
                self.values.update(before)

    def reset(self) -> None:
        """Sets the flags of the group, and of the groups within, to their defaults."""
        if self.values:
            check_outside_loop("set flags")
            self.values.clear()
        for group in self.groups().values():
            group.reset()


def check_outside_loop(action: str) -> None:
    """Raises UsageError inside the loop of an executor. action: what to do before the loop, for the message."""
    check_outside_of_loops(f"the step is compiled once: {action} before the loop of an executor, not inside it")


def boolean(value: Any) -> bool:
    """Returns True or False, or raises ConfigurationError."""
    if not isinstance(value, bool):
        raise ConfigurationError("must be True or False")
    return value


def count(value: Any) -> int:
    """Returns an int of at least 1, or raises ConfigurationError."""
    if type(value) is not int or value < 1:
        raise ConfigurationError("must be an int of at least 1")
    return value


def whole_number(value: Any) -> int:
    """Returns an int of at least 0, or raises ConfigurationError."""
    if type(value) is not int or value < 0:
        raise ConfigurationError("must be an int of at least 0")
    return value


def at_most(most: int, check: Callable[[Any], int]) -> Callable[[Any], int]:
    """Returns a check for the ints of another check that are not above `most`."""

    def check_both(value: Any) -> int:
        checked = check(value)
        if checked > most:
            raise ConfigurationError(f"must be at most {most}")
        return checked

    return check_both


def one_of(*values: Value) -> Callable[[Any], Value]:
    """Returns a check for one of these values, of the same type."""

    def check(value: Any) -> Value:
        if value not in values or type(value) not in map(type, values):
            raise ConfigurationError(f"must be one of {', '.join(map(repr, values))}")
        chosen: Value = value
        return chosen

    return check


def optional(check: Callable[[Any], Value]) -> Callable[[Any], Value | None]:
    """Returns a check for None, or for the values of another check."""

    def either(value: Any) -> Value | None:
        return None if value is None else check(value)

    return either


def text(value: Any) -> str:
    """Returns a string, or raises ConfigurationError."""
    if not isinstance(value, str):
        raise ConfigurationError("must be a str")
    return value


def anything(value: Any) -> Any:
    """Returns the value."""
    return value
