"""What a name of the API is here, and whether it fits the uses that public_names.toml tells of."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any


def found(name: str) -> Any:
    """What a script gets that writes the dotted name: an attribute, or else a module.

    Raises:
        AttributeError, ImportError: there is none.
    """
    parent, _, leaf = name.rpartition(".")
    if not parent:
        return import_module(name)
    try:
        return getattr(found(parent), leaf)
    except AttributeError:
        pass
    try:
        return import_module(name)
    except ImportError:
        return getattr(import_module(parent), leaf)  # of a module behind a function of the same name


def kind_of(value: Any) -> str:
    """class, function, module or value."""
    if inspect.isclass(value):
        return "class"
    if isinstance(value, ModuleType):
        return "module"
    return "function" if callable(value) else "value"


def misuses(value: Any, uses: list[str]) -> Iterator[str]:
    """The uses that a value does not fit."""
    for use in uses:
        if use == "module":
            fits = kind_of(value) in ("module", "function")  # a function hides the module of its name
        elif use == "class":
            fits = kind_of(value) == "class"
        elif use == "value":
            fits = True
        else:
            fits = callable(value) and (use == "decorator" or _takes(value, use))
        if not fits:
            yield use


def _takes(function: Any, use: str) -> bool:
    """Whether a function takes the arguments of a call, written as "call(2, a, b, ...)"."""
    if inspect.isclass(function) and issubclass(function, Exception):
        return True  # takes anything
    count, *names = use.removeprefix("call(").removesuffix(")").split(", ")
    signature = inspect.signature(function)
    bind = signature.bind_partial if "..." in names else signature.bind
    try:
        bind(*[None] * int(count), **{name: None for name in names if name != "..."})
    except TypeError:
        return False
    return True
