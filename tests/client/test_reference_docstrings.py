"""`help()` of the public API is a reference: each parameter of each callable of ours is described."""

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

from compatibility import _find  # noqa: E402  from docs
from name_uses import found as found_by_name  # noqa: E402  from docs

PACKAGES = ("cstorch", "cerebras_appliance", "cerebras_pytorch", "cerebras_torch")


def is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in PACKAGES


def public_values() -> Iterator[Any]:
    """What the names of the reference, and those that public scripts use, stand for."""
    for module, names in tomllib.loads((DOCS / "reference_surface.toml").read_text()).items():
        for name in names:
            is_there, value = _find(module, name)
            if is_there:
                yield value
    for names in tomllib.loads((DOCS / "public_names.toml").read_text()).values():
        for name in names:
            yield found_by_name(name)


def callables() -> dict[str, tuple[Any, str]]:
    """The public functions, constructors and methods of ours, by name, with the docstrings that may describe them."""
    found: dict[str, tuple[Any, str]] = {}
    for value in public_values():
        if not is_ours(value) or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        name = f"{value.__module__}.{value.__qualname__}"
        if not inspect.isclass(value):
            found[name] = (value, inspect.getdoc(value) or "")
            continue
        for kind in inspect.getmro(value):
            if is_ours(kind):
                found |= of_class(kind)
    return found


def of_class(kind: type[Any]) -> dict[str, tuple[Any, str]]:
    name = f"{kind.__module__}.{kind.__qualname__}"
    own = kind.__doc__ or ""
    found = {}
    for attribute, value in vars(kind).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if attribute == "__init__" and inspect.isfunction(function) and is_ours(function):
            found[name] = (function, f"{inspect.cleandoc(own)}\n{inspect.cleandoc(function.__doc__ or '')}")
        elif not attribute.startswith("_") and inspect.isfunction(function):
            found[f"{name}.{attribute}"] = (function, inspect.getdoc(getattr(kind, attribute)) or "")
    return found


CALLABLES = callables()


def undescribed(function: Any, text: str) -> list[str]:
    """The parameters without an entry `name: meaning`, which may share one: `first, second: meaning`."""
    arguments = "\n".join(re.findall(r"^Args:\n((?:(?: .*)?\n?)*)", text, flags=re.MULTILINE))
    entries = re.findall(r"^    ([\w*, ]+):", arguments, flags=re.MULTILINE)
    described = {name.strip().lstrip("*") for entry in entries for name in entry.split(",")}
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls", *described)]


@pytest.mark.parametrize("name", sorted(CALLABLES))
def test_each_parameter_is_described(name: str) -> None:
    function, text = CALLABLES[name]
    assert undescribed(function, text) == []


def test_each_name_of_the_reference_says_where_it_is_described() -> None:
    lacking = []
    for module, names in tomllib.loads((DOCS / "reference_surface.toml").read_text()).items():
        for name in names:
            _, value = _find(module, name)
            is_own_name = getattr(value, "__name__", "") == name and is_ours(value)
            is_callable = inspect.isclass(value) or inspect.isfunction(value)
            if is_own_name and is_callable and "\nReference: release" not in (inspect.getdoc(value) or ""):
                lacking.append(f"{module}.{name}")
    assert lacking == []


def test_each_class_says_what_it_is() -> None:
    kinds = {kind for value in public_values() if inspect.isclass(value) for kind in inspect.getmro(value)}
    lacking = [kind for kind in kinds if is_ours(kind) and not (kind.__doc__ or "").partition("\n")[0].strip()]
    assert lacking == []


def test_much_is_looked_at() -> None:
    assert len(CALLABLES) > 400
