"""Where processes keep what they need not make twice, and what they do where there is no room."""

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path

CACHE_VARIABLE = "WAFERBOX_CACHE"
RECOVERY_VARIABLE = "WAFERBOX_RECOVERY_DIR"
KEY_BYTES = 32


def cache_root() -> Path:
    """$WAFERBOX_CACHE, or the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "waferbox"


def recovery_root() -> Path:
    """$WAFERBOX_RECOVERY_DIR, or a folder in the cache: what jobs go on from when somebody has died."""
    named = os.environ.get(RECOVERY_VARIABLE)
    return Path(named).absolute() if named else cache_root() / "recovery"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, under another name until all of it is on the disk. Raises OSError, and leaves nothing then."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def secret_key(path: Path) -> bytes:
    """The key in a file that its owner alone may read; a fresh one, if there is none or it could be known to others.

    Of processes that come at the same time all get the same key. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        if not _is_secret(path):
            path.unlink(missing_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)  # whole, and the first to come
    finally:
        fresh.unlink(missing_ok=True)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read(KEY_BYTES)


def _is_secret(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return private and found.st_size == KEY_BYTES


def why_not_kept(folder: Path, nbytes: int, reason: str | None, variable: str = CACHE_VARIABLE) -> str:
    """For the user whose files a folder did not take: which folder, why, what it has room for, and the way out."""
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(existing).free
    return (
        f"{folder}: {reason or 'not writable'} ({nbytes / 1e6:.2f} MB are needed, {free / 1e6:.2f} MB are free). "
        f"Make room there, or start the cluster with {variable} set to another folder"
    )
