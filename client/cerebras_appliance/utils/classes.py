"""The subclasses of a class."""

from collections.abc import Callable, Iterator
from typing import TypeVar

Class = TypeVar("Class")


def retrieve_all_subclasses(
    cls: type[Class], condition: Callable[[type[Class]], bool] | None = None
) -> Iterator[type[Class]]:
    """Yields the subclasses of a class, and theirs, each once.

    Args:
        cls: The class.
        condition: Whether to yield a subclass; None: all.

    Reference: release 2.10, `cerebras.appliance.utils.classes`.
    """
    seen: set[type[Class]] = set()
    waiting = list(cls.__subclasses__())
    while waiting:
        subclass = waiting.pop(0)
        if subclass not in seen:
            seen.add(subclass)
            if condition is None or condition(subclass):
                yield subclass
            waiting += subclass.__subclasses__()
