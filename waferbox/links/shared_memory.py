"""Memory that processes of one host share: a sealed memfd, or a file. Neither has a name, so nothing is left behind.

A memfd is sealed, so that its owner cannot kill the processes that have mapped it by shrinking it. A file cannot be
sealed. So a process maps a file only if the file belongs to the process's user, whose other processes could kill it
anyway, and if the file has no name by which another user could open it.
"""

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from waferbox.host.process_limits import too_large

if TYPE_CHECKING:
    import torch

_MADV_POPULATE_READ = 22
# A process that reads mapped memory which its owner has shrunk gets SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """A piece of shared memory. Its owner makes it and maps it; a peer gets the file descriptor over a link.

    A peer maps a memfd as a whole. It maps each part of a file separately, while the part is viewed, since mapped pages
    of a file stay in memory. Used by one thread at a time.
    """

    def __init__(self, descriptor: int, nbytes: int, *, in_file: bool = False, whole: bool = True) -> None:
        """Takes over the descriptor. Called by `create`, `create_in` and `from_fd`."""
        self._descriptor = descriptor
        self.nbytes = nbytes
        self.in_file = in_file
        self.whole = whole  # whether it is mapped as a whole
        self.buffer = memoryview(b"")
        if whole:
            self._map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
            self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, nbytes: int) -> "SharedMemory":
        """New memory, filled with zeros; its pages are allocated on first use.

        Raises:
            OSError: the limit of the size of files forbids it (EFBIG), or that of descriptors (EMFILE).
        """
        assert nbytes > 0
        # The name only shows in /proc/PID/smaps which process owns the memory.
        descriptor = os.memfd_create(f"waferbox-{os.getpid()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with _size_limit_explained(nbytes):  # which counts for a memfd as well
                os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def create_in(cls, folder: Path, nbytes: int) -> "SharedMemory":
        """New memory, filled with zeros, in a file without a name, whose disk space is allocated at once.

        Raises:
            OSError: the folder cannot be written, its disk has no room (ENOSPC), or the limit of the size of files
                forbids the file (EFBIG).
            ValueError: the folder lies in memory itself.
        """
        assert nbytes > 0
        descriptor = _open_unnamed(folder)
        try:
            if _seals(descriptor) is not None:
                raise ValueError(f"{folder} is not on a disk, but in memory")
            with _size_limit_explained(nbytes):
                os.posix_fallocate(descriptor, 0, nbytes)
            return cls(descriptor, nbytes, in_file=True)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def from_fd(cls, descriptor: int, nbytes: int) -> "SharedMemory":
        """Memory that another process has made; takes over the descriptor.

        Raises:
            ValueError: the memory is smaller than `nbytes`, or another user could shrink it.
        """
        try:
            status = os.fstat(descriptor)
            if nbytes <= 0 or status.st_size < nbytes:
                raise ValueError(f"the shared memory has {status.st_size} bytes, not {nbytes}")
            seals = _seals(descriptor)
            if seals is not None:
                if not seals & fcntl.F_SEAL_SHRINK:
                    raise ValueError("the shared memory is not sealed")
                return cls(descriptor, nbytes)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink or status.st_uid != os.geteuid():
                raise ValueError("the shared memory is a file that has a name, or that belongs to another user")
            return cls(descriptor, nbytes, in_file=True, whole=False)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._descriptor < 0

    def fileno(self) -> int:
        """The memory's file descriptor, which this object still owns."""
        return self._descriptor

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Some bytes of the memory; those of a peer's file are read-only."""
        if self.whole or not nbytes:
            return self.buffer[offset : offset + nbytes]
        assert not self.closed
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        part = mmap.mmap(
            self._descriptor, skipped + nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset - skipped
        )
        # Reads ahead this part alone: mapped pages stay in memory, which may have no room for those around the part.
        part.madvise(mmap.MADV_WILLNEED)
        part.madvise(mmap.MADV_RANDOM)
        with contextlib.suppress(OSError):  # before Linux 5.14 pages are mapped as they are touched
            part.madvise(_MADV_POPULATE_READ)
        return memoryview(part)[skipped:]

    def tensor(self, dtype: "torch.dtype", shape: tuple[int, ...], offset: int) -> "torch.Tensor":
        """A contiguous tensor that views memory mapped as a whole, from `offset` bytes after its start."""
        assert self.whole
        return view_as_tensor(self.buffer, dtype, shape, offset)

    def close(self) -> None:
        """Frees the memory once no tensor views it any more."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        # The mapping is freed with its last view: Python refuses to close it under a tensor, which would crash.
        self.buffer = memoryview(b"")
        if self.whole:
            del self._map


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes in shared memory."""

    memory: SharedMemory
    offset: int
    nbytes: int

    @property
    def view(self) -> memoryview:
        return self.memory.view(self.offset, self.nbytes)


@contextlib.contextmanager
def _size_limit_explained(nbytes: int) -> Iterator[None]:
    """Makes the error of a file that may not have so many bytes name the limit."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise too_large(nbytes) from error
        raise


def _open_unnamed(folder: Path) -> int:
    """The descriptor of a new file in the folder, without a name."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(prefix="waferbox-", dir=folder)  # a file system without O_TMPFILE
    os.unlink(name)
    return descriptor


def _seals(descriptor: int) -> int | None:
    """The seals of a memfd; None for another file."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


@functools.cache
def _torch() -> ModuleType:
    """torch, imported only by processes that view memory as tensors.

    torch warns once in a process that a tensor views read-only bytes. The warning is used up here, since no process
    writes to a received group.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
    return torch


def view_as_tensor(
    buffer: "memoryview | bytearray", dtype: "torch.dtype", shape: tuple[int, ...], offset: int
) -> "torch.Tensor":
    """A tensor that views a buffer, from `offset` bytes after its start."""
    torch = _torch()
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(shape)
