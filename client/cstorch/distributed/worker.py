"""What an input worker gets: environment variables, and a folder for copies of its data."""

import os
import shutil
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from waferbox.host.folders import cache_root

# --- Environment variables that the input workers are to have as well -------------------------------------------------


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

# --- The folder in which an input_fn may keep copies of its data near the worker --------------------------------------


WORKER_CACHE_ROOT = os.fspath(cache_root() / "worker")

# What else lies on the disk needs room too.
_SHARE_OF_DISK = 0.8


def hit_worker_cache_limit(src_dir: str, dest_dir: str) -> tuple[bool, int, int]:
    """Whether a copy of a folder would fill the disk of the worker cache to more than four fifths.

    Args:
        src_dir: what would be copied.
        dest_dir: to where, below WORKER_CACHE_ROOT; what is there now would go.

    Returns:
        Whether it would, the bytes of src_dir, and the bytes that a copy may have.

    Raises:
        ValueError: dest_dir lies outside of WORKER_CACHE_ROOT.
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
    """The bytes of all files in a folder and below; 0 where there is none."""
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    return sum(file.lstat().st_size for file in files)
