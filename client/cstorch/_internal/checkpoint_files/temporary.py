"""Files that get their names when they are complete, and the removal of incomplete files of killed processes."""

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
    """The file that HDF5 writes to; it hides write errors from HDF5, and `check` raises the first one.

    HDF5 cannot close a file after a write error: it keeps the file open, prints thousands of errors, and may crash the
    process.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+", opener=_opened)
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

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self._error = self._error or error
            return self.tell() if size is None else size

    def check(self) -> None:
        """Raises the first OSError of a write, if any."""
        if self._error is not None:
            raise self._error


def _opened(path: str, flags: int) -> int:
    # By Python's function, which a checked run replaces.
    return os.open(path, flags, 0o666)


@contextmanager
def new_file(target: Path) -> Iterator[Output]:
    """Context of a file with a temporary name, which is renamed to `target`, durably, unless an error is raised.

    After an error, or if the process is killed, there is no `target`. Temporary files of killed processes in the folder
    are removed first; a lock protects the files of live processes.

    Raises:
        OSError: The file cannot be written.
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
        # Another process removed the file before it was locked.
        output.close()


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            with path.open("rb+") as file:
                if _lock(file.fileno()):
                    path.unlink(missing_ok=True)
        except OSError:
            continue  # another process has removed it, or it belongs to another user


def _lock(descriptor: int) -> bool | None:
    """Whether this process has the lock now; None if the file system has no locks."""
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
