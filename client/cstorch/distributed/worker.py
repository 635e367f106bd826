"""The environment variables of an input worker, and its folder for copies of its data."""

import os
import shutil
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from waferbox.host.folders import cache_root

# --- Environment variables for the input workers ----------------------------------------------------------------------


class WorkerEnvironment(MutableMapping[str, str]):
    """os.environ, whose variables that are set here the input workers get too, from the next execution on.

    Iteration and length are those of these variables only.
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
        """Sets a variable that has no value to the default, and returns its value. The workers get the variable.

        Args:
            key: The name of the variable.
            default: The default.
        """
        self[key] = value = os.environ.get(key, default)
        return value

    def copy(self) -> dict[str, str]:
        """Returns the variables that the workers get."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes unpickling, in a worker, set the variables."""
        return _receive, (dict(self),)


def _receive(variables: dict[str, str]) -> WorkerEnvironment:
    os.environ.update(variables)
    return appliance_environ


appliance_environ = WorkerEnvironment()

# --- The folder for an input_fn's copies of its data ------------------------------------------------------------------


WORKER_CACHE_ROOT = os.fspath(cache_root() / "worker")

# The rest of the disk is for other files.
_SHARE_OF_DISK = 0.8


def hit_worker_cache_limit(src_dir: str, dest_dir: str) -> tuple[bool, int, int]:
    """Computes whether a copy of a folder would fill the disk of the worker cache to more than four fifths.

    Args:
        src_dir: The folder to copy.
        dest_dir: The place of the copy, below WORKER_CACHE_ROOT. Its present content would be replaced.

    Returns:
        Whether it would; the bytes of `src_dir`; and the bytes that a copy may have.

    Raises:
        ValueError: `dest_dir` lies outside of WORKER_CACHE_ROOT.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    root, destination = Path(WORKER_CACHE_ROOT).resolve(), Path(dest_dir).resolve()
    if not destination.is_relative_to(root):
        raise ValueError(f"{dest_dir} is not below the worker cache, {root}")
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    disk = shutil.disk_usage(existing)
    wanted = get_dir_size(src_dir)
    available = int(_SHARE_OF_DISK * disk.total) - disk.used + get_dir_size(destination)
    return wanted > available, wanted, max(0, available)


def get_dir_size(path: str | os.PathLike[str]) -> int:
    """Returns the bytes of all files in a folder and below; 0 if there is no such folder.

    Args:
        path: The folder.

    Reference: release 2.10, `cerebras.pytorch.utils.utils`.
    """
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(file.lstat().st_size for file in files)
