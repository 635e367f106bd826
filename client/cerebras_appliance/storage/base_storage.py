"""Readers, writers and deleters, chosen by the path. A subclass adds a kind of path."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from cerebras_appliance.utils.classes import retrieve_all_subclasses

__all__ = ["StorageDeleter", "StorageReader", "StorageWriter"]

Path = str | os.PathLike[str]
Kind = TypeVar("Kind", bound="_Storage")


class _Storage:
    """One path. Asked of the base, the class methods ask its subclasses."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._path

    @classmethod
    def is_valid_path(cls, path: Path) -> bool:
        """Whether a subclass is for such paths."""
        return any(subclass.is_valid_path(path) for subclass in retrieve_all_subclasses(cls))

    @classmethod
    def path_exists(cls, path: Path) -> bool:
        """Whether something is there."""
        return any(
            subclass.is_valid_path(path) and subclass.path_exists(path) for subclass in retrieve_all_subclasses(cls)
        )

    @classmethod
    def get_type(cls: type[Kind], path: Path) -> type[Kind]:
        """The subclass that is for such paths.

        Raises:
            ValueError: there is none, or several.
        """
        found = [subclass for subclass in retrieve_all_subclasses(cls) if subclass.is_valid_path(path)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(sorted(subclass.__name__ for subclass in found))
            raise ValueError(f"{path} can be a path of several subclasses of {cls.__name__}: {names}")
        raise ValueError(
            f"no {cls.__name__} is for {os.fspath(path)!r}: a checkpoint is a file; copy it from elsewhere first"
        )

    @classmethod
    def get(cls: type[Kind], path: Path, *args: Any, **kwargs: Any) -> Kind:
        """The object for a path; further arguments are for its constructor. Raises as get_type."""
        return cls.get_type(path)(path, *args, **kwargs)


class StorageReader(_Storage, ABC):
    """Reads what is at a path."""

    @dataclass(frozen=True, slots=True)
    class Stats:
        """What is known without reading. st_mtime: when it was written, in seconds since 1970."""

        path: Path
        st_mtime: float

    def exists(self) -> bool:
        """Whether something is there."""
        return self.path_exists(self.path)

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """What is known without reading."""

    @abstractmethod
    def read(self, key: str | None) -> tuple[Any, dict[str, Any]]:
        """What is stored under a key, and its metadata; None: nothing, and the metadata of the whole."""

    @cached_property
    def global_metadata(self) -> dict[str, Any]:
        """The metadata of the whole."""
        return self.read(None)[1]


class StorageWriter(_Storage):
    """Tells whether a path can be written. Checkpoints are written whole, by `cstorch.save`."""

    @classmethod
    def get(cls: type[Kind], path: Path, *args: Any, **kwargs: Any) -> Kind:
        """As of the base, for a path at which nothing is.

        Raises:
            FileExistsError: something is there.
        """
        kind = cls.get_type(path)
        if kind.path_exists(path):
            raise FileExistsError(f"{path} exists; checkpoints are never overwritten: delete it first")
        return kind(path, *args, **kwargs)


class StorageDeleter(_Storage, ABC):
    """Deletes what is at a path."""

    @abstractmethod
    def delete(self, key: str | None = None) -> bool:
        """Deletes it, or what is stored under a key. Returns whether it was there."""
