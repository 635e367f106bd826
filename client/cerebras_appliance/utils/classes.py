"""What there is of a class."""

from collections.abc import Iterator
from typing import TypeVar

Class = TypeVar("Class")


def retrieve_all_subclasses(cls: type[Class]) -> Iterator[type[Class]]:
    """The classes made from a class, and those made from them, each once."""
    seen: set[type[Class]] = set()
    waiting = list(cls.__subclasses__())
    while waiting:
        subclass = waiting.pop(0)
        if subclass not in seen:
            seen.add(subclass)
            yield subclass
            waiting += subclass.__subclasses__()
