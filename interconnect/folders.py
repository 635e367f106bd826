"""Where processes of a user find what they share: the cache folder, and keys that its owner alone may read."""

import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import Final

CACHE_VARIABLE: Final = "WAFERBOX_CACHE"
KEY_BYTES: Final = 32


def cache_root() -> Path:
    """$WAFERBOX_CACHE, or the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "waferbox"


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
