"""Loggers that are named after classes, two more levels, and loggers for the levels of the cluster's servers."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar, overload

VERBOSE = 15
TRACE = 5

_ROOT = "cerebras"
_LEVELS = {"VERBOSE": VERBOSE, "TRACE": TRACE}

for _name, _level in _LEVELS.items():
    logging.addLevelName(_level, _name)

Class = TypeVar("Class", bound=type)


def _logger(name: str) -> logging.Logger:
    """Returns the logger of a name, with a method for each of the two levels."""
    logger = logging.getLogger(name)
    vars(logger).update(verbose=partial(logger.log, VERBOSE), trace=partial(logger.log, TRACE))
    return logger


wsc_logger = _logger(f"{_ROOT}.wsc")


class ClassLogger:
    """A class whose `logger` is named after its module and itself, unless `named_class_logger` names it.

    Reference: release 2.10, `cerebras.appliance.log`.
    """

    logger: ClassVar[logging.Logger] = _logger(_ROOT)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named_class_logger(cls)


@overload
def named_class_logger(cls_or_namespace: Class) -> Class: ...
@overload
def named_class_logger(cls_or_namespace: str | None = None) -> Callable[[Class], Class]: ...
def named_class_logger(cls_or_namespace: Any = None) -> Any:
    """Gives a class a `logger`: `@named_class_logger`, `@named_class_logger()` or `@named_class_logger("Trainer")`.

    Args:
        cls_or_namespace: The class, or the name of the logger below "cerebras"; None: as the class.

    Raises:
        TypeError: It is neither.

    Reference: release 2.10, `cerebras.appliance.log`.
    """
    if isinstance(cls_or_namespace, type):
        return _with_logger(cls_or_namespace, None)
    if cls_or_namespace is not None and not isinstance(cls_or_namespace, str):
        raise TypeError(f"a logger is named after a class or has a name, not {cls_or_namespace!r}")
    return lambda cls: _with_logger(cls, cls_or_namespace)


def _with_logger(cls: Class, name: str | None) -> Class:
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    cls.logger = _logger(name if name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")  # type: ignore[attr-defined]
    return cls


def get_level_name(level: int | str) -> int | str:
    """Returns the name of a level of logging, or the level of a name (in any case).

    Args:
        level: The level, or the name.
    """
    found: int | str = logging.getLevelName(level.upper() if isinstance(level, str) else level)
    return found


@dataclass(frozen=True, slots=True, order=True)
class WscLogSetting:
    """A level of the logs of the cluster's servers.

    Args:
        tag: The servers; None: all.
        level: The level.
    """

    tag: str | None
    level: int


def collect_wsc_log_settings() -> list[WscLogSetting]:
    """Returns the levels that were set on `wsc_logger` and its children.

    Waferbox's roles log at the level that `waferbox up` gives them; these settings change nothing.
    """
    prefix = f"{wsc_logger.name}."
    loggers = [wsc_logger, *(logging.getLogger(name) for name in _names_below(prefix))]
    settings = [
        WscLogSetting(tag=logger.name.removeprefix(prefix) if logger is not wsc_logger else None, level=logger.level)
        for logger in loggers
        if logger.level != logging.NOTSET
    ]
    return sorted(settings, key=lambda setting: setting.tag or "")


def _names_below(prefix: str) -> list[str]:
    return [name for name in list(logging.Logger.manager.loggerDict) if name.startswith(prefix)]
