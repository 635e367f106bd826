"""Objects of a script's classes in batches: what they hold is found, and they are made again with other tensors."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from waferbox.input_process.batch_classes import holds_tensors, is_container, register_classes


class Batch(dict[str, Any]):
    """A dict with methods of its own."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("a batch is not changed")

    def items(self) -> Any:
        return {"changed": 0}.items()


class Attributes(dict[str, Any]):
    """A dict whose attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Both(dict[str, Any]):
    """A dict that has each item as an attribute as well."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)


class Ordered(OrderedDict[str, Any]):
    """An OrderedDict."""


class Lists(defaultdict[str, list[Any]]):
    """A defaultdict."""


class Tagged(list[Any]):
    """A list with an attribute."""

    def __init__(self, items: list[Any], tag: str) -> None:
        super().__init__(items)
        self.tag = tag


class Pair(tuple[Any, ...]):
    """A tuple with a constructor of its own."""

    def __new__(cls, first: Any, second: Any) -> "Pair":
        return super().__new__(cls, (first, second))


class Encoding(UserDict[str, Any]):
    """A UserDict, as the encodings of tokenizers are."""


@dataclass(frozen=True, slots=True)
class Sample:
    rows: torch.Tensor
    name: str = "sample"


@dataclass
class Samples:
    parts: list[Sample] = field(default_factory=list)


class Plain:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


class Private:
    __slots__ = ("__rows", "unset")

    def __init__(self, rows: torch.Tensor) -> None:
        self.__rows = rows

    @property
    def rows(self) -> torch.Tensor:
        return self.__rows


ROWS = torch.arange(4.0)


def lists() -> Lists:
    made = Lists(list)
    made["rows"].append(ROWS)
    return made


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: Batch(rows=ROWS), lambda made: made["rows"]),
    "attributes that are items": (lambda: Attributes(rows=ROWS), lambda made: made.rows),
    "attributes beside items": (lambda: Both(rows=ROWS), lambda made: made.rows),
    "OrderedDict": (lambda: Ordered(rows=ROWS), lambda made: next(iter(made.values()))),
    "defaultdict": (lists, lambda made: [*made["others"], *made["rows"]][0]),
    "list": (lambda: Tagged([ROWS], "tag"), lambda made: made[0] if made.tag == "tag" else None),
    "tuple": (lambda: Pair(ROWS, 1), lambda made: made[0] if made[1] == 1 else None),
    "UserDict": (lambda: Encoding(rows=ROWS), lambda made: made["rows"]),
    "frozen dataclass with slots": (lambda: Sample(ROWS), lambda made: made.rows if made.name == "sample" else None),
    "objects in objects": (lambda: Samples([Sample(ROWS)]), lambda made: made.parts[0].rows),
    "a plain class": (lambda: Plain(ROWS), lambda made: made.rows),
    "private slots": (lambda: Private(ROWS), lambda made: made.rows),
    "SimpleNamespace": (lambda: SimpleNamespace(rows=ROWS), lambda made: made.rows),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_object_is_made_again_with_other_tensors(kind: str) -> None:
    make, rows_of = OBJECTS[kind]
    value = make()
    register_classes({"batch": [value]})
    leaves, structure = pytree.tree_flatten(value)
    assert sum(leaf is ROWS for leaf in leaves) == 1
    made = pytree.tree_unflatten([leaf + 1 if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)
    assert type(made) is type(value)
    assert pytree.tree_structure(made) == structure == pytree.tree_structure(make())
    assert torch.equal(rows_of(made), ROWS + 1)
    assert rows_of(value) is ROWS


def test_the_places_of_tensors_are_named() -> None:
    batch = {"q": Samples([Sample(ROWS)]), "d": Batch(rows=ROWS), "t": Tagged([ROWS], "tag")}
    register_classes(batch)
    places = [pytree.keystr(path) for path, leaf in pytree.tree_flatten_with_path(batch)[0] if leaf is ROWS]
    assert places == ["['q'].parts[0].rows", "['d']['rows']", "['t'][0]"]


def test_other_keys_are_another_structure() -> None:
    register_classes(Batch(rows=ROWS))
    assert pytree.tree_structure(Batch(rows=ROWS)) != pytree.tree_structure(Batch(others=ROWS))


class Circle:
    def __init__(self) -> None:
        self.rows = ROWS
        self.owners = [self]


class Number:
    def __init__(self) -> None:
        self.rows = 4


@pytest.mark.parametrize(
    ("value", "has_tensors"),
    [(Circle(), True), (nn.Linear(2, 2), False), (Number(), False), ("text", False), (Sample, False)],
    ids=["one that holds itself", "a module", "one without tensors", "a text", "a class"],
)
def test_what_stays_a_leaf(value: Any, has_tensors: bool) -> None:
    register_classes([value])
    assert pytree.tree_leaves([value]) == [value]
    assert holds_tensors(value) == has_tensors


def test_a_long_chain_of_objects_is_searched() -> None:
    chain: Any = Plain(ROWS)
    for _ in range(10_000):
        chain = [chain]
    assert holds_tensors(chain)


def test_only_classes_that_are_meant_are_registered() -> None:
    class Rows(list[torch.Tensor]):
        pass

    class Owner(Plain):
        pass

    owner = Owner(ROWS)
    register_classes([owner, Rows([ROWS])], is_container)
    leaves = pytree.tree_leaves([owner, Rows([ROWS])])
    assert leaves[0] is owner
    assert leaves[1] is ROWS
