"""Operations for which the script has a function of its own, which is traced in their place."""

from collections.abc import Callable, Mapping
from typing import Any

from torch._ops import OpOverload

TABLE: dict[OpOverload, Callable[..., Any]] = {}

_running: set[OpOverload] = set()


def applies(func: OpOverload) -> bool:
    """Whether there is one for an operation, and it is not the one that calls the operation."""
    return func in TABLE and func not in _running


def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls the script's function."""
    _running.add(func)
    try:
        return TABLE[func](*args, **kwargs)
    finally:
        _running.remove(func)
