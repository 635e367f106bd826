"""Every name that the public scripts of a release use is there, of the right kind, and takes what they give it."""

import inspect
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NAMES: dict[str, dict[str, list[str]]] = tomllib.loads(
    (Path(__file__).parents[2] / "docs" / "public_names.toml").read_text()
)
# What is on its way.
OPEN = {
    "cerebras.pytorch.nn.SelectiveGrad",
    "cerebras.pytorch.nn.functional.sparse_act_matmul",
    "cerebras.pytorch.nn.functional.sparse_matmul",
    "cerebras.pytorch.utils.data.DataExecutor",
}


def found(name: str) -> Any:
    """What a script gets that writes the name: an attribute, or else a module."""
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


def misuses(value: Any, uses: list[str]) -> Iterator[str]:
    """The uses that a value does not fit."""
    for use in uses:
        if use == "module":
            fits = isinstance(value, ModuleType) or callable(value)  # a function hides the module of its name
        elif use == "class":
            fits = inspect.isclass(value)
        elif use == "value":
            fits = True
        else:
            fits = callable(value) and (use == "decorator" or takes(value, use))
        if not fits:
            yield use


def takes(function: Any, use: str) -> bool:
    """Whether a function takes the arguments of a call, written as "call(2, a, b, ...)"."""
    count, *names = use.removeprefix("call(").removesuffix(")").split(", ")
    if inspect.isclass(function) and issubclass(function, Exception):
        return True  # takes anything
    signature = inspect.signature(function)
    bind = signature.bind_partial if "..." in names else signature.bind
    try:
        bind(*[None] * int(count), **{name: None for name in names if name != "..."})
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("release", NAMES)
def test_names_of_a_release(release: str) -> None:
    wrong = []
    for name, uses in NAMES[release].items():
        if name in OPEN:
            continue
        try:
            wrong += [f"{name} does not fit {use}" for use in misuses(found(name), uses)]
        except (AttributeError, ImportError) as error:
            wrong.append(f"{name}: {error}")
    assert wrong == []


@pytest.mark.parametrize("release", NAMES)
def test_there_are_facts_of_a_release(release: str) -> None:
    assert len(NAMES[release]) > 60


@pytest.mark.parametrize(
    ("use", "fits"),
    [
        ("call(2, c)", True),
        ("call(0, c, ...)", True),
        ("call(1)", False),
        ("call(2, d)", False),
        ("call(4)", False),
        ("class", False),
        ("module", True),
        ("decorator", True),
        ("value", True),
    ],
)
def test_a_use_fits_or_not(use: str, fits: bool) -> None:
    def sample(a: int, b: int, c: int = 1) -> None:
        pass

    assert list(misuses(sample, [use])) == ([] if fits else [use])
