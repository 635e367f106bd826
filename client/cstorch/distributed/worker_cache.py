"""The folder in which an input_fn may keep copies of its data near the worker."""

import os
import shutil
from pathlib import Path

from nodes.folders import cache_root

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
