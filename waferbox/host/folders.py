"""Folders in which processes of a user keep files: the cache, recovery points, and keys that only the user may read.

Messages for a folder without room are made here too.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import shlex
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from waferbox import settings

# --- The cache and keys -----------------------------------------------------------------------------------------------


KEY_BYTES: Final = 32


def cache_root() -> Path:
    """$WAFERBOX_CACHE, or the user's cache folder; one in the temporary folder for a user without a home.

    Raises PermissionError: that one belongs to another user, whose compiled kernels must not be loaded.
    """
    if (named := settings.CACHE.get()) is not None:
        return named
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "waferbox"
    try:
        return Path.home() / ".cache" / "waferbox"
    except RuntimeError:  # the user is unknown to the host, as in a container, and HOME is not set
        folder = Path(tempfile.gettempdir()) / f"waferbox-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: name another folder by {settings.CACHE.name}")
    return folder


def secret_key(path: Path) -> bytes:
    """The key in a file that only its owner may read; a new one, if there is none or others could have read it.

    Processes that call this at the same time get the same key. Raises OSError, also for a file of another kind, which
    is left as it is.
    """
    make_folder(path.parent, 0o700)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # held for as long as it takes to write one small file
        key = read_secret_key(path)
        if key is None:
            _make_secret_key(path)
            key = read_secret_key(path)
    finally:
        os.close(folder)
    if key is None:
        raise OSError(f"{path} belongs to another user, or its folder does")
    return key


def _make_secret_key(path: Path) -> None:
    """Writes a new key, in place of a former one or of an empty file. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size not in (0, KEY_BYTES):
            raise OSError(f"what is there is left as it is, though no key, which has {KEY_BYTES} bytes")
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        fresh.replace(path)  # complete, as other processes may read the file without the lock
    finally:
        fresh.unlink(missing_ok=True)


def read_secret_key(path: Path) -> bytes | None:
    """The key in a file; None if there is none, or another user can read or change the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
    except OSError:
        return None
    try:
        return os.read(descriptor, KEY_BYTES) if _is_key(os.fstat(descriptor)) else None
    finally:
        os.close(descriptor)


def check_secret_key(path: Path) -> None:
    """Raises OSError for what is no key, or one that others may have read or written; it says how to mend that.

    An empty file is none yet. Root is no exception: the owner of the file could change the key, or find a folder of
    root's that is not there yet.
    """
    try:
        found = path.lstat()
    except OSError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is no file, as a secret is: remove it, or name another by {settings.SECRET_FILE.name}")
    if not found.st_size:
        return
    if found.st_size != KEY_BYTES:
        raise OSError(
            f"{path} is no secret, or is damaged: it has {found.st_size} bytes, and a secret has {KEY_BYTES}. Remove "
            f"it for a new one, or name another by {settings.SECRET_FILE.name}"
        )
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to the user {found.st_uid}, and a secret must be this process's user's ({os.geteuid()}): "
            f"`install -m 600 {shlex.quote(str(path))} COPY`, and name the copy by {settings.SECRET_FILE.name}"
        )
    if found.st_mode & 0o077:
        raise PermissionError(
            f"{path} has the mode {stat.S_IMODE(found.st_mode):04o}, so that others than its owner may have read or "
            f"changed the secret: `chmod 600 {shlex.quote(str(path))}`, or remove it for a new one"
        )


def _is_key(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size == KEY_BYTES and _is_private(found)


def _is_private(found: os.stat_result) -> bool:
    """Whether a file or folder is this user's, and no other user can read or change it."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


# --- Folders and their room -------------------------------------------------------------------------------------------


def recovery_root() -> Path:
    """The folder of recovery points: $WAFERBOX_RECOVERY_DIR, or a folder in the cache."""
    return settings.RECOVERY_DIR.get() or cache_root() / "recovery"


def check_private(folder: Path) -> None:
    """Raises PermissionError where the folder is not this user's, or others may read or write in it; OSError."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_private(found):
        raise PermissionError(f"{folder} is not a folder of this user alone")


def make_folder(folder: Path, mode: int = 0o755) -> None:
    """Makes a folder, and those above it that are missing, in which no other user can write, whatever the umask.

    Raises OSError.
    """
    if not folder.parent.exists():
        make_folder(folder.parent)
    folder.mkdir(mode=mode, exist_ok=True)


def write_whole(path: Path, content: bytes, *, durable: bool = True, by_umask: bool = False) -> None:
    """Writes a file, under another name until it is complete. Raises OSError, and then leaves no file.

    Args:
        path: of the file, whose folder is made if it is missing.
        content: of the file.
        durable: whether to wait until the file is on the disk, so that it survives a crash of the host.
        by_umask: whether the umask alone says who may write to the file and folder, as with other files of the user.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    if by_umask:
        path.parent.mkdir(parents=True, exist_ok=True)
    else:
        make_folder(path.parent)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o666 if by_umask else 0o644), "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


# What the system, or SQLite, says of a folder without room, or of a user without a share of it.
_FULL: Final = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "database or disk is full")


def why_not_kept(folder: Path, nbytes: int, reason: str | None, variable: str = settings.CACHE.name) -> str:
    """Text for the user about a folder that took no files: the folder, the reason, room that lacks, and the way out.

    Args:
        folder: the folder, which need not exist.
        nbytes: bytes that are needed.
        reason: the system's error message; None where there is none.
        variable: the variable that can name another folder.
    """
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(existing).free
    why, other = f"{folder}: {reason or 'not writable'}", f"the cluster with {variable} set to another folder"
    if free >= nbytes and reason not in _FULL:
        return f"{why}. Start {other}"
    room = f"{nbytes / 1e6:.2f} MB are needed, {free / 1e6:.2f} MB are free"
    return f"{why} ({room}). Make room there, or start {other}"
