"""Where recovery points lie: a folder for each job, in it one for each member and one for copies of its points."""

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from waferbox.host.folders import check_private
from waferbox.states.point_file import PARTIAL, is_point

SWEPT_SECONDS: Final = 24 * 3600.0  # after so long without any change a job's folder has no owner
_COPY: Final = "-copy"  # behind the name of a member, for copies that another keeps
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_POINT: Final = re.compile(rf"([0-9]{{1,20}})(\.[0-9a-f]+{re.escape(PARTIAL)})?")


def member_folder(root: Path, job: str, member: str) -> Path:
    """Of a member's points. Raises ValueError for names that nobody has made for a job or a member."""
    for name in (job, member):
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name[:256]!r} is no name for a folder with recovery points")
    return root / job / member


def copy_folder(root: Path, job: str, member: str) -> Path:
    """Of the copies of a member's points that others keep. Raises ValueError as member_folder."""
    return member_folder(root, job, member + _COPY)


def find_point(root: Path, job: str, member: str, number: int) -> Path:
    """The file of a member's point, or a copy. Raises FileNotFoundError; ValueError as member_folder."""
    for folder in (member_folder(root, job, member), copy_folder(root, job, member)):
        path = folder / str(number)
        if path.exists():
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def folder_identity(root: Path) -> str:
    """Equal for processes of one machine exactly if this is the same folder to them, by whatever path. Raises OSError.

    Not the host's own identity, which differs between containers: they may share a folder.
    """
    boot, found = Path("/proc/sys/kernel/random/boot_id").read_text(), root.stat()
    return hashlib.sha256(f"{boot}/{found.st_dev}/{found.st_ino}".encode()).hexdigest()[:16]


def make_member_folder(folder: Path) -> None:
    """Make a member's folder, which nobody else may read. Raises OSError, also where it is somebody else's."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, exist_ok=True)
        check_private(made)


def remove_partial(folder: Path) -> None:
    """Remove what a member that died has left unfinished."""
    for path, _ in _points(folder):
        if path.name.endswith(PARTIAL):
            _unlink(path)


def remove_points(folder: Path, before: int) -> None:
    """Remove a member's points with smaller numbers; and the folders, if nothing is left there."""
    for path, number in _points(folder):
        if number < before:
            _unlink(path)
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def remove_copies(job_folder: Path, before: int) -> None:
    """Remove the copies of points with smaller numbers, of all members of a job; and the folders likewise."""
    for folder in _folders(job_folder):
        if folder.name.endswith(_COPY):
            remove_points(folder, before)


def sweep(root: Path, older_than_seconds: float = SWEPT_SECONDS) -> None:
    """Remove the points of jobs that have no owner any more: in whose folder nothing was changed for so long."""
    newest = time.time() - older_than_seconds
    for job in _folders(root):
        members = list(_folders(job))
        with contextlib.suppress(OSError):
            changed = [path.lstat().st_mtime for member in members for path in (member, *member.iterdir())]
            if max(changed, default=newest) > newest:
                continue
            for member in members:
                for path, _ in _points(member):
                    if is_point(path):
                        _unlink(path)
                member.rmdir()
            job.rmdir()


def _points(folder: Path) -> Iterator[tuple[Path, int]]:
    """The files of points, complete or not, and their numbers."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in list(folder.iterdir()):
            found = _POINT.fullmatch(path.name)
            if found is not None:
                yield path, int(found[1])


def _folders(folder: Path) -> Iterator[Path]:
    """Of this user and with names that this module gives."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if _NAME.fullmatch(path.name) is not None and stat.S_ISDIR(path.lstat().st_mode):
                yield path


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
