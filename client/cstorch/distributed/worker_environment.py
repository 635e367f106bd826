"""Environment variables that the input workers are to have as well."""

import os
from collections.abc import Iterator, MutableMapping
from typing import Any


class WorkerEnvironment(MutableMapping[str, str]):
    """os.environ, whose variables that are set here the input workers get too, from the next execution on.

    It iterates over, and counts, only these.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        return os.environ[name]

    def __setitem__(self, name: str, value: str) -> None:
        os.environ[name] = value
        self._names.add(name)

    def __delitem__(self, name: str) -> None:
        del os.environ[name]
        self._names.discard(name)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(name for name in self._names if name in os.environ))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def setdefault(self, key: str, default: str) -> str:
        """The variable's value; the default, if it has none, which it has from then on. The workers get it."""
        self[key] = value = os.environ.get(key, default)
        return value

    def copy(self) -> dict[str, str]:
        """The variables that the workers get."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Where it is unpickled, in a worker, the variables are set."""
        return _receive, (dict(self),)


def _receive(variables: dict[str, str]) -> WorkerEnvironment:
    os.environ.update(variables)
    return appliance_environ


appliance_environ = WorkerEnvironment()
