"""Where processes keep what they need not make twice, and what they do where there is no room."""

import contextlib
import os
import secrets
import shutil
import stat
from pathlib import Path

from interconnect.folders import CACHE_VARIABLE as CACHE_VARIABLE
from interconnect.folders import cache_root as cache_root

RECOVERY_VARIABLE = "WAFERBOX_RECOVERY_DIR"


def recovery_root() -> Path:
    """$WAFERBOX_RECOVERY_DIR, or a folder in the cache: what jobs go on from when somebody has died."""
    named = os.environ.get(RECOVERY_VARIABLE)
    return Path(named).absolute() if named else cache_root() / "recovery"


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


def why_not_kept(folder: Path, nbytes: int, reason: str | None, variable: str = CACHE_VARIABLE) -> str:
    """For the user whose files a folder did not take: which folder, why, what it has room for, and the way out."""
    existing = next(place for place in (folder, *folder.parents) if place.is_dir())
    free = shutil.disk_usage(existing).free
    return (
        f"{folder}: {reason or 'not writable'} ({nbytes / 1e6:.2f} MB are needed, {free / 1e6:.2f} MB are free). "
        f"Make room there, or start the cluster with {variable} set to another folder"
    )
