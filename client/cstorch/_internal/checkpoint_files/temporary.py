"""A file that gets its name when it is whole; what a process that was killed has left of one is removed by the next."""

import fcntl
import io
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_SUFFIX: Final = ".cstorch.tmp"


class Output(io.FileIO):
    """The file below HDF5, which does not notice that a write failed.

    HDF5 cannot close a file that it cannot write: it keeps it open, says so thousands of times, and may crash the
    process in the end. So what fails is remembered, and `check` raises it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+")
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        nbytes = len(left)
        try:
            while len(left) and self._error is None:
                left = left[super().write(left) :]
        except OSError as error:
            self._error = error
        return nbytes

    def check(self) -> None:
        """Raises OSError."""
        if self._error is not None:
            raise self._error


@contextmanager
def new_file(target: Path) -> Iterator[Output]:
    """A file under another name in the same folder, which becomes `target`, durably, if nothing is raised.

    If something is, or the process is killed, there is no `target`. What processes that were killed have left in the
    folder is removed. A writer holds a lock on its file, so that no file of a living process is.

    Raises:
        OSError: it cannot be written.
    """
    _remove_abandoned(target.parent)
    output = _locked_file(target)
    path = Path(output.name)
    try:
        with output:
            yield output
            output.check()
            os.fsync(output.fileno())
            path.rename(target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def _locked_file(target: Path) -> Output:
    while True:
        output = Output(target.with_name(f"{target.name}.{secrets.token_hex(4)}{_SUFFIX}"))
        if _lock(output.fileno()) is not False and os.fstat(output.fileno()).st_nlink:
            return output
        # Somebody took it for abandoned in the moment before it was locked.
        output.close()


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            with path.open("rb+") as file:
                if _lock(file.fileno()):
                    path.unlink(missing_ok=True)
        except OSError:
            continue  # another has removed it, or it belongs to another user


def _lock(descriptor: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has no locks, so that nobody gets one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
