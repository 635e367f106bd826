"""Where processes of a user keep files: the cache, recovery points, keys that their owner alone may read; and what is
said where there is no room.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Final

from waferbox import settings

# ----------------------------------------------------------------------------------------------------------------------
# Where processes of a user find what they share: the cache folder, and keys that its owner alone may read


KEY_BYTES: Final = 32


def cache_root() -> Path:
    """$WAFERBOX_CACHE, or the user's cache folder."""
    named = settings.CACHE.get()
    return named or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "waferbox"


def secret_key(path: Path) -> bytes:
    """The key in a file that its owner alone may read; a fresh one, if there is none or it could be known to others.

    Of processes that come at the same time all get the same key. Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        raise OSError(f"{path} belongs to somebody else, or its folder does")
    return key


def _make_secret_key(path: Path) -> None:
    """In place of whatever is there."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        fresh.replace(path)  # whole: others may read it without the lock
    finally:
        fresh.unlink(missing_ok=True)


def read_secret_key(path: Path) -> bytes | None:
    """The key in a file, if it is there and nobody else can read or change it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        return file.read(KEY_BYTES) if _is_private(os.fstat(descriptor)) else None


def _is_private(found: os.stat_result) -> bool:
    private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return private and found.st_size == KEY_BYTES


# --- Where processes keep what they need not make twice, and what they do where there is no room ----------------------


def recovery_root() -> Path:
    """$WAFERBOX_RECOVERY_DIR, or a folder in the cache: what jobs go on from when somebody has died."""
    return settings.RECOVERY_DIR.get() or cache_root() / "recovery"


def check_private(folder: Path) -> None:
    """Raises PermissionError where others may read or write what is in the folder, or it is theirs; OSError."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")


def write_whole(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Writes a file, under another name until it is complete. Raises OSError, and leaves nothing then.

    durable: whether to wait until it is on the disk, so that it outlives the host too.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def why_not_kept(folder: Path, nbytes: int, reason: str | None, variable: str = settings.CACHE.name) -> str:
    """For the user whose files a folder did not take: which folder, why, what it has room for, and the way out."""
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(existing).free
    return (
        f"{folder}: {reason or 'not writable'} ({nbytes / 1e6:.2f} MB are needed, {free / 1e6:.2f} MB are free). "
        f"Make room there, or start the cluster with {variable} set to another folder"
    )
