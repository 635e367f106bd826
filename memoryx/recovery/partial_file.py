"""A file that has another name until it is complete."""

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import Final

from memoryx.files.file_pages import PassingFile

PARTIAL: Final = ".partial"


def partial_path(path: Path) -> Path:
    """A name that nobody else gives, for what is to become this file."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PARTIAL}")


class PartialFile:
    """For its user alone. Not thread-safe."""

    def __init__(self, path: Path, room_bytes: int, *, stays_in_memory: bool) -> None:
        """
        path: the name that it gets. room_bytes: that the disk must have.
        stays_in_memory: whether the system may keep what was written in memory for a while, as it does with any file.

        Raises:
            OSError: the folder cannot be written, or its disk has no room (ENOSPC).
        """
        self.path = path
        self.partial = partial_path(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.partial, flags, 0o600)
        self._pages = None if stays_in_memory else PassingFile(self._descriptor)
        try:
            disk = os.fstatvfs(self._descriptor)
            if disk.f_bavail * disk.f_frsize < room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.discard()
            raise

    def write(self, content: memoryview | bytes, offset: int) -> None:
        done, view = 0, memoryview(content)
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], offset + done)
        if self._pages is not None:
            self._pages.written(offset, len(view))

    def complete(self) -> None:
        """It gets its name."""
        os.replace(self.partial, self.path)
        self._close()

    def discard(self) -> None:
        """Give the file up; has no effect on one that is complete."""
        if self._descriptor >= 0:
            self._close()
            with contextlib.suppress(OSError):
                self.partial.unlink()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1
