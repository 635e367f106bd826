"""The folders of recovery points: one for each job, and in it one for each member and one for copies of its points."""

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from waferbox.host.folders import check_private, make_folder
from waferbox.states.point_file import PARTIAL, is_point

SWEPT_SECONDS: Final = 24 * 3600.0  # a job's folder that was not changed for so long has no owner
_COPY: Final = "-copy"  # follows the name of the member whose points are copied
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_POINT: Final = re.compile(rf"([0-9]{{1,20}})(\.[0-9a-f]+{re.escape(PARTIAL)})?")


def member_folder(root: Path, job: str, member: str) -> Path:
    """Returns the folder of a member's points. Raises ValueError: the name of no job or member has this form."""
    for name in (job, member):
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{name[:256]!r} is no name for a folder with recovery points")
    return root / job / member


def copy_folder(root: Path, job: str, member: str) -> Path:
    """Returns the folder of copies of a member's points on other hosts. Raises ValueError as `member_folder`."""
    return member_folder(root, job, member + _COPY)


def find_point(root: Path, job: str, member: str, number: int) -> Path:
    """Returns the file of a member's point, or of a copy. Raises FileNotFoundError; ValueError as `member_folder`."""
    for folder in (member_folder(root, job, member), copy_folder(root, job, member)):
        path = folder / str(number)
        if path.exists():
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def folder_identity(root: Path) -> str:
    """Returns a text that two processes of one machine share exactly if the folder is the same for both.

    The name of the host does not do: it differs between containers, which may share a folder.

    Raises:
        OSError: there is no such folder.
    """
    boot, found = Path("/proc/sys/kernel/random/boot_id").read_text(), root.stat()
    return hashlib.sha256(f"{boot}/{found.st_dev}/{found.st_ino}".encode()).hexdigest()[:16]


def make_member_folder(folder: Path) -> None:
    """Makes a member's folder, readable by this user alone. Raises OSError: it cannot be made, or is another user's."""
    make_folder(folder.parent.parent)
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, exist_ok=True)
        check_private(made)


def remove_partial(folder: Path) -> None:
    """Removes unfinished points of a member that died."""
    for path, _ in _points(folder):
        if path.name.endswith(PARTIAL):
            _unlink(path)


def remove_points(folder: Path, before: int) -> None:
    """Removes a member's points with smaller numbers, and the folders if they are empty then."""
    for path, number in _points(folder):
        if number < before:
            _unlink(path)
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def remove_copies(job_folder: Path, before: int) -> None:
    """Removes the copies of points with smaller numbers, of all members of a job, and folders that are empty then."""
    for folder in _folders(job_folder):
        if folder.name.endswith(_COPY):
            remove_points(folder, before)


def remove_job(root: Path, job: str) -> None:
    """Removes all points and copies of a job that has ended, and its folders. Raises ValueError as `member_folder`."""
    if _NAME.fullmatch(job) is None:
        raise ValueError(f"{job[:256]!r} is no name for a folder with recovery points")
    with contextlib.suppress(OSError):
        _remove(root / job, list(_folders(root / job)))


def sweep(root: Path, older_than_seconds: float = SWEPT_SECONDS) -> None:
    """Removes the points of jobs without an owner: no file or folder of theirs was changed for so long."""
    newest = time.time() - older_than_seconds
    for job in _folders(root):
        members = list(_folders(job))
        with contextlib.suppress(OSError):
            changed = [path.lstat().st_mtime for member in members for path in (member, *member.iterdir())]
            if max(changed, default=newest) > newest:
                continue
            _remove(job, members)


def _remove(job: Path, members: Sequence[Path]) -> None:
    """Removes the points in these folders of a job, and the folders. Raises OSError: they have other files."""
    for member in members:
        for path, _ in _points(member):
            if is_point(path):
                _unlink(path)
        member.rmdir()
    job.rmdir()


def _points(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yields the files of points, complete or not, with their numbers."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in list(folder.iterdir()):
            found = _POINT.fullmatch(path.name)
            if found is not None:
                yield path, int(found[1])


def _folders(folder: Path) -> Iterator[Path]:
    """Yields the folders with names of the form that this module makes."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if _NAME.fullmatch(path.name) is not None and stat.S_ISDIR(path.lstat().st_mode):
                yield path


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
