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
    """The parts of annotations.

    Reference: release 2.10, `cerebras.pytorch.core.annotation`.
    """

    @dataclass
    class Config:
        """The base class of an annotation's settings.

        Args:
            enable_fwd: Whether operations of the forward pass are annotated.
            enable_bwd: Whether operations of the backward pass are annotated.
        """

        enable_fwd: bool
        enable_bwd: bool

    @dataclass
    class Attribute:
        """One attribute of an annotated operation.

        Args:
            name: The name of the attribute.
            value: Its value.
        """

        name: str
        value: Any


def create_annotation(
    annotation_config: type[AnnotationMode.Config],
    get_attribute_fn: Callable[[Any, bool], AnnotationMode.Attribute],
    **kwargs: Any,
) -> Callable[[Function], Function]:
    """Returns a decorator for functions whose operations are to be annotated. Here it checks its arguments only.

    Args:
        annotation_config: The class of the settings, which checks them.
        get_attribute_fn: A function of the settings, and whether it is the backward pass, that returns the attribute.
        **kwargs: The settings.

    Reference: release 2.10, `cerebras.pytorch.core.annotation`.
    """
    config = annotation_config(**kwargs)
    for is_backward in (False, True):
        get_attribute_fn(config, is_backward)
    return lambda function: function


_level: ContextVar[int | None] = ContextVar("level", default=None)


def pol(
    level: int | None = None, bwd_level: int | None = None, enable_fwd: bool = True, enable_bwd: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator for functions that ask for an optimization level of their own.

    Here the level of the whole step, `cstorch.backends.csx.precision.optimization_level`, holds for these functions
    too.

    Args:
        level: 0, 1 or 2; None: the level of the step.
        bwd_level: The level of the backward pass; None: `level`.
        enable_fwd: Whether the level is for the forward pass.
        enable_bwd: Whether the level is for the backward pass.

    Raises:
        ConfigurationError: There is no such level.

    Reference: release 2.10, `cerebras.pytorch`.
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
    """Returns the optimization level that is asked for where it is called: 0, 1 or 2.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    level = _level.get()
    return backends.csx.precision.optimization_level if level is None else level


@contextmanager
def device_annotation(
    device: Literal["wgth", "acth", "wafer"], enable_fwd: bool = True, enable_bwd: bool = True
) -> Iterator[None]:
    """Marks operations that are to run on weight hosts, activation hosts or the wafer; a decorator, or a context.

    Here it has no effect: the compiler chooses the processes itself.

    Args:
        device: "wgth", "acth" or "wafer".
        enable_fwd: Whether the mark is for the forward pass.
        enable_bwd: Whether the mark is for the backward pass.

    Raises:
        ConfigurationError: There is no such device.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if device not in DEVICES:
        raise ConfigurationError(f"the device of an annotation must be one of {', '.join(DEVICES)}, not {device!r}")
    yield
