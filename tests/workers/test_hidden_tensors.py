"""Tensors are found wherever an object of a script's class holds them."""

from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from waferbox.input_process.hidden_tensors import hides_tensors


class Items(dict[str, Any]):
    """A dict that shows other values than it has."""

    def values(self) -> Any:
        return {}.values()


class Elements(list[Any]):
    """A list that shows no elements."""

    def __iter__(self) -> Any:
        return iter(())


class Ordered(OrderedDict[str, Any]):
    """An OrderedDict."""


class Private:
    __slots__ = ("__rows", "unset")

    def __init__(self, rows: Any) -> None:
        self.__rows = rows


@dataclass(frozen=True, slots=True)
class Sample:
    rows: Any


@dataclass
class Samples:
    parts: list[Any] = field(default_factory=list)


class Circle:
    def __init__(self, rows: Any) -> None:
        self.owners = [self]
        self.rows = rows


def chain(rows: Any) -> Any:
    for _ in range(10_000):
        rows = [rows]
    return rows


def with_attribute(rows: Any) -> Items:
    made = Items()
    made.rows = rows  # type: ignore[attr-defined]
    return made


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a dict": lambda rows: Items(rows=rows),
    "attributes of a dict": with_attribute,
    "a list": lambda rows: Elements([rows]),
    "a deque": lambda rows: SimpleNamespace(rows=deque([rows])),
    "an OrderedDict": lambda rows: Ordered(rows=rows),
    "a UserDict": lambda rows: UserDict(rows=rows),
    "a UserList": lambda rows: UserList([rows]),
    "a namespace": lambda rows: SimpleNamespace(rows=(rows,)),
    "slots": Private,
    "a frozen dataclass": Sample,
    "objects in an object": lambda rows: Samples([Sample(rows)]),
    "one that holds itself": Circle,
    "a long chain": chain,
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_hidden_tensors_are_found(kind: str) -> None:
    assert hides_tensors(HOLDERS[kind](torch.ones(2)))
    assert not hides_tensors(HOLDERS[kind](None))
    assert not hides_tensors(HOLDERS[kind]("text"))


@pytest.mark.parametrize("value", [nn.Linear(2, 2), "text", Sample, None, len], ids=str)
def test_modules_classes_and_texts_hide_none(value: Any) -> None:
    assert not hides_tensors(value)
