"""Checkpoints in files."""

import os
import re
from pathlib import Path as FilePath
from typing import Any

import h5py

from cerebras_appliance.storage.base_storage import Path, StorageDeleter, StorageReader, StorageWriter
from cstorch.errors import UsageError

__all__ = ["H5Deleter", "H5Reader", "H5Writer"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class _FilePaths:
    """Paths without a scheme (`s3:`), which are those of files."""

    @classmethod
    def is_valid_path(cls, path: Path) -> bool:
        """Whether a path is that of a file, which need not exist.

        Args:
            path: The path.
        """
        return _SCHEME.match(os.fspath(path)) is None

    @classmethod
    def path_exists(cls, path: Path) -> bool:
        """Whether a file or a folder exists at a path.

        Args:
            path: The path.
        """
        return os.path.exists(path)


class H5Reader(_FilePaths, StorageReader):
    """Reads an H5 file; `cstorch.load` reads a checkpoint.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no H5 file.
    """

    def __init__(self, path: Path) -> None:
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no checkpoint {path}")
        if not h5py.is_hdf5(path):
            raise ValueError(f"{path} is no H5 file")
        super().__init__(path)

    @property
    def fstat(self) -> os.stat_result:
        """The file's entry in the file system."""
        return os.stat(self.path)

    @property
    def stats(self) -> StorageReader.Stats:
        return StorageReader.Stats(self.path, self.fstat.st_mtime)

    def read(self, key: str | None) -> tuple[Any, dict[str, Any]]:
        with h5py.File(self.path, "r") as file:
            if key is None:
                return None, dict(file.attrs)
            return file[key][()], dict(file[key].attrs)


class H5Writer(_FilePaths, StorageWriter):
    """The class of writable files. It cannot be made.

    Args:
        path: The file.
        *args: Those of the real system.
        **kwargs: Those of the real system.

    Raises:
        UsageError: Always.
    """

    def __init__(self, path: Path, *args: Any, **kwargs: Any) -> None:
        raise UsageError("checkpoints are written whole: use cstorch.save(state_dict, path)")


class H5Deleter(_FilePaths, StorageDeleter):
    """Deletes a checkpoint's file.

    Args:
        path: The file.
    """

    def delete(self, key: str | None = None) -> bool:
        """Deletes the file.

        Args:
            key: Must be None.

        Returns:
            Whether it existed.

        Raises:
            UsageError: A key is given: checkpoints do not change.
        """
        if key is not None:
            raise UsageError("a checkpoint does not change: nothing in it can be deleted, only the whole file")
        was_there = os.path.exists(self.path)
        FilePath(self.path).unlink(missing_ok=True)
        return was_there
