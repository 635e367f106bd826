"""Names for parts of the step, and for modules. They change no number.

A part of a module that is in no list of modules is a layer of its own in the compile report.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from cstorch._internal.tracing import name_operations

_names: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


@contextmanager
def name_scope(name: str, raw: bool = False) -> Iterator[str]:
    """Makes operations of the traced step, within it, belong to a part of this name of the module that runs.

    Args:
        name: The name of the part.
        raw: Accepted without effect: names are always taken as they are.

    Example:
        In a module's `forward`::

            with cstorch.name_scope("attention"):
                scores = q @ k.transpose(-1, -2)

    Reference: release 2.10, `cerebras.pytorch`.
    """
    with name_operations(name):
        yield name


def set_debug_scope(name: str) -> None:
    """Accepts a name for the operations that follow, without effect: use `name_scope`.

    Args:
        name: The name; None: no name.

    Raises:
        TypeError: The name is no str.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"a scope is named by a str, not {type(name).__name__}")


def add_debug_name(module: nn.Module, root_name: str | None = None) -> None:
    """Names a module and all modules in it by their paths.

    Args:
        module: The module.
        root_name: The name of the module itself; None: the name of its class.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    root = type(module).__name__ if root_name is None else root_name
    for path, child in module.named_modules():
        _names[child] = f"{root}.{path}" if path else root


def get_debug_name(module: nn.Module) -> str:
    """Returns the name that `add_debug_name` gave a module, or else the name of its class.

    Args:
        module: The module.

    Reference: release 2.10, `cerebras.pytorch`.
    """
    return _names.get(module, type(module).__name__)
