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
    """The base class of readers, writers and deleters of one path. Class methods of a base try its subclasses.

    Args:
        path: The path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        """The path."""
        return self._path

    @classmethod
    def is_valid_path(cls, path: Path) -> bool:
        """Whether a subclass is for such paths.

        Args:
            path: The path.
        """
        return any(subclass.is_valid_path(path) for subclass in retrieve_all_subclasses(cls))

    @classmethod
    def path_exists(cls, path: Path) -> bool:
        """Whether something exists at a path.

        Args:
            path: The path.
        """
        return any(
            subclass.is_valid_path(path) and subclass.path_exists(path) for subclass in retrieve_all_subclasses(cls)
        )

    @classmethod
    def get_type(cls: type[Kind], path: Path) -> type[Kind]:
        """Returns the subclass that is for a path.

        Args:
            path: The path.

        Raises:
            ValueError: There is none, or several.
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
        """Returns the object for a path.

        Args:
            path: The path.
            *args: The other arguments of its constructor.
            **kwargs: The other arguments of its constructor.

        Raises:
            ValueError: There is no subclass for the path, or several.
        """
        return cls.get_type(path)(path, *args, **kwargs)


class StorageReader(_Storage, ABC):
    """The base class of readers.

    Args:
        path: The path.
    """

    @dataclass(frozen=True, slots=True)
    class Stats:
        """The facts about a path that are known without reading.

        Args:
            path: The path.
            st_mtime: The time of the writing, in seconds since 1970.
        """

        path: Path
        st_mtime: float

    def exists(self) -> bool:
        """Whether something exists at the path."""
        return self.path_exists(self.path)

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """The facts that are known without reading."""

    @abstractmethod
    def read(self, key: str | None) -> tuple[Any, dict[str, Any]]:
        """Returns the value under a key, and its metadata.

        Args:
            key: The key; None: no value, and the metadata of the whole.
        """

    @cached_property
    def global_metadata(self) -> dict[str, Any]:
        """The metadata of the whole."""
        return self.read(None)[1]


class StorageWriter(_Storage):
    """The class of writable paths. Checkpoints are written whole, by `cstorch.save`."""

    @classmethod
    def get(cls: type[Kind], path: Path, *args: Any, **kwargs: Any) -> Kind:
        """Returns the object for a path at which nothing exists.

        Args:
            path: The path.
            *args: The other arguments of its constructor.
            **kwargs: The other arguments of its constructor.

        Raises:
            FileExistsError: Something exists there.
            ValueError: There is no subclass for the path, or several.
        """
        kind = cls.get_type(path)
        if kind.path_exists(path):
            raise FileExistsError(f"{path} exists; checkpoints are never overwritten: delete it first")
        return kind(path, *args, **kwargs)


class StorageDeleter(_Storage, ABC):
    """The base class of deleters.

    Args:
        path: The path.
    """

    @abstractmethod
    def delete(self, key: str | None = None) -> bool:
        """Deletes what is at the path, or what is stored under a key.

        Args:
            key: The key; None: all.

        Returns:
            Whether it existed.
        """
