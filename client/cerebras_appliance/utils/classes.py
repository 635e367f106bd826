"""What there is of a class."""

from collections.abc import Callable, Iterator
from typing import TypeVar

Class = TypeVar("Class")


def retrieve_all_subclasses(
    cls: type[Class], condition: Callable[[type[Class]], bool] | None = None
) -> Iterator[type[Class]]:
    """The classes made from a class, and those made from them, each once; those for which `condition` holds."""
    seen: set[type[Class]] = set()
    waiting = list(cls.__subclasses__())
    while waiting:
        subclass = waiting.pop(0)
        if subclass not in seen:
            seen.add(subclass)
            if condition is None or condition(subclass):
                yield subclass
            waiting += subclass.__subclasses__()
