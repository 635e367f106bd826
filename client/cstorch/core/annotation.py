"""Annotations of operations: hints to the compiler of the real system. Here they are checked and have no effect."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar

from cstorch import backends
from cstorch.errors import ConfigurationError

Function = TypeVar("Function", bound=Callable[..., Any])

DEVICES = ("wgth", "acth", "wafer")


class AnnotationMode:
    """What annotations are made of."""

    @dataclass
    class Config:
        """The base of an annotation's settings.

        enable_fwd, enable_bwd: whether it is for operations of the forward pass, and of the backward pass.
        """

        enable_fwd: bool
        enable_bwd: bool

    @dataclass
    class Attribute:
        """What an annotation says of an operation."""

        name: str
        value: Any


def create_annotation(
    annotation_config: type[AnnotationMode.Config],
    get_attribute_fn: Callable[[Any, bool], AnnotationMode.Attribute],
    **kwargs: Any,
) -> Callable[[Function], Function]:
    """A decorator for functions whose operations are to be annotated.

    Args:
        annotation_config: made of `kwargs`, which it checks.
        get_attribute_fn: gives the attribute for the config, in the forward or the backward pass.
    """
    config = annotation_config(**kwargs)
    for is_backward in (False, True):
        get_attribute_fn(config, is_backward)
    return lambda function: function


_level: ContextVar[int | None] = ContextVar("level", default=None)


def pol(
    level: int | None = None, bwd_level: int | None = None, enable_fwd: bool = True, enable_bwd: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for functions that would be computed at another optimization level than the rest of the step.

    Here the level of the whole step, `cstorch.backends.csx.precision.optimization_level`, holds for them as well.

    Args:
        level: 0, 1 or 2; None for that of the step.
        bwd_level: of the backward pass; None for `level`.
        enable_fwd, enable_bwd: whether it is for the forward pass, and for the backward pass.

    Raises:
        ConfigurationError: there is no such level.
    """
    for value in (level, bwd_level):
        if value is not None and (type(value) is not int or value not in (0, 1, 2)):
            raise ConfigurationError(f"an optimization level must be 0, 1 or 2, or None, not {value!r}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            token = _level.set(level if enable_fwd and level is not None else _level.get())
            try:
                return function(*args, **kwargs)
            finally:
                _level.reset(token)

        return call

    return decorate


def current_pol() -> int:
    """The optimization level that is asked for where it is called."""
    level = _level.get()
    return backends.csx.precision.optimization_level if level is None else level


@contextmanager
def device_annotation(
    device: Literal["wgth", "acth", "wafer"], enable_fwd: bool = True, enable_bwd: bool = True
) -> Iterator[None]:
    """A decorator, or context, for operations that are to run on weight hosts, activation hosts or the wafer.

    Here the compiler decides that for itself.

    Raises:
        ConfigurationError: there is no such device.
    """
    if device not in DEVICES:
        raise ConfigurationError(f"the device of an annotation must be one of {', '.join(DEVICES)}, not {device!r}")
    yield
