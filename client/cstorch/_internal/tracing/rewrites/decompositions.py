"""Decompositions of the script: functions that are traced instead of operations."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch._library.custom_ops import OPDEFS
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


def function_of_script(func: OpOverload) -> Callable[..., Any] | None:
    """Returns the function of an operation of torch.library.custom_op, if it is for any device, or for the CPU."""
    definition = OPDEFS.get(func._schema.name)
    if definition is None:
        return None
    kernels: Mapping[str | None, Callable[..., Any]] = definition._backend_fns
    kernel = kernels.get(None) or kernels.get("cpu")
    return kernel and inspect.unwrap(kernel)  # torch's wrapper would import dynamo
