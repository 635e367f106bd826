"""Classes by their names in a configuration."""

import inspect
from typing import Any


def class_named(base: type[Any], name: str, what: str, suffix: str = "") -> type[Any]:
    """The subclass of that name, in any case and with or without the suffix. ValueError, if there is none."""
    classes = [found for found in _subclasses(base) if not inspect.isabstract(found)]
    wanted = name.lower()
    for found in classes:
        if found.__name__.lower() in (wanted, wanted + suffix.lower()):
            return found
    known = ", ".join(sorted(found.__name__ for found in classes))
    raise ValueError(f"there is no {what} {name!r}; there are {known}")


def _subclasses(base: type[Any]) -> list[type[Any]]:
    return [found for child in base.__subclasses__() for found in (child, *_subclasses(child))]
