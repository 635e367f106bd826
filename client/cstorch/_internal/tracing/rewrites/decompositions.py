"""Decompositions of the script: functions that are traced instead of operations."""

from collections.abc import Callable, Mapping
from typing import Any

from torch._ops import OpOverload

TABLE: dict[OpOverload, Callable[..., Any]] = {}

_running: set[OpOverload] = set()


def applies(func: OpOverload) -> bool:
    """Whether an operation has a decomposition, and is not called by it."""
    return func in TABLE and func not in _running


def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls the decomposition of an operation."""
    _running.add(func)
    try:
        return TABLE[func](*args, **kwargs)
    finally:
        _running.remove(func)
