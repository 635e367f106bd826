"""torch's reference functions without the import of dynamo, half a second, that the first call of one costs.

They infer the shapes of results on the meta device, and are marked as not to be compiled: the mark imports dynamo to
switch it off. Where nobody has imported it there is nothing to switch off.
"""

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch._decomp import meta_table

_DYNAMO = "torch._dynamo"
_MARK = "__dynamo_disable"  # where torch keeps, with a function, the one that is called in its place
_WRAPPER = torch._disable_dynamo(lambda: None).__code__  # type: ignore[attr-defined]


def import_dynamo_late() -> None:
    """Have the marked functions run as they are until somebody imports dynamo, and from then on as torch has them."""
    for wrapper in _wrappers():
        _run_until_imported(wrapper, _wrapped(wrapper))


def _wrappers() -> Iterator[FunctionType]:
    """All functions that would import dynamo, of those that meta tensors and other references call."""
    references = (module for name, module in list(sys.modules.items()) if name.startswith("torch._refs"))
    candidates = [*meta_table.values(), *(value for module in references for value in vars(module).values())]
    for function in candidates:
        while isinstance(function, FunctionType):
            if function.__code__ is _WRAPPER:
                yield function
            function = _wrapped(function)


def _wrapped(function: FunctionType) -> Any:
    """What a decorated function calls; None where it calls no other, or not by torch's usual name."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["fn"].cell_contents if "fn" in cells else None


def _run_until_imported(wrapper: Callable[..., Any], function: FunctionType) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO not in sys.modules:
            return function(*args, **kwargs)
        if function.__dict__.get(_MARK) is run:
            del function.__dict__[_MARK]
        return wrapper(*args, **kwargs)

    function.__dict__.setdefault(_MARK, run)
