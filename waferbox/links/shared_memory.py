"""Memory that processes of one host share: a sealed memfd, or a file. Neither has a name, so nothing is left behind.

A memfd is sealed: who has mapped it cannot be killed by its owner's shrinking it. A file cannot be sealed. So one is
taken only if it belongs to the receiver's own user, whose processes could end the receiver anyway, and if it has no
name by which anybody else could open it.
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
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MADV_POPULATE_READ = 22
# A peer that could shrink the memory could kill whoever has mapped it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """A piece of shared memory. Its owner makes it and maps it; a peer gets the file descriptor over a link.

    A peer maps a memfd as a whole, and of a file each part for itself, for as long as it is viewed: pages of a file
    that somebody has mapped stay in memory.
    """

    def __init__(self, descriptor: int, nbytes: int, *, in_file: bool = False, whole: bool = True) -> None:
        """Takes the descriptor over. Use `create`, `create_in` or `from_fd`."""
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
        """New memory, filled with zeros; pages are taken when they are touched first."""
        assert nbytes > 0
        # The name, by which /proc/PID/smaps tells whose memory it is, has no other meaning.
        descriptor = os.memfd_create(f"waferbox-{os.getpid()}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def create_in(cls, folder: Path, nbytes: int) -> "SharedMemory":
        """New memory, filled with zeros, in a file without a name in the folder, on whose disk it has all its room.

        Raises:
            OSError: the folder cannot be written, or its disk has no room (ENOSPC).
            ValueError: the folder lies in memory itself.
        """
        assert nbytes > 0
        descriptor = _open_unnamed(folder)
        try:
            if _seals(descriptor) is not None:
                raise ValueError(f"{folder} is not on a disk, but in memory")
            os.posix_fallocate(descriptor, 0, nbytes)
            return cls(descriptor, nbytes, in_file=True)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def from_fd(cls, descriptor: int, nbytes: int) -> "SharedMemory":
        """Memory that another process made; takes the descriptor over.

        Raises:
            ValueError: the memory is smaller than said, or somebody could shrink it who is not to be trusted with that.
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
        """The memory's file descriptor; it stays this memory's."""
        return self._descriptor

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Some bytes of the memory; of a peer's file they cannot be written."""
        if self.whole or not nbytes:
            return self.buffer[offset : offset + nbytes]
        assert not self.closed
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        part = mmap.mmap(
            self._descriptor, skipped + nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=offset - skipped
        )
        # All of it is wanted, and nothing around it, which the owner may not have room for. What is mapped stays.
        part.madvise(mmap.MADV_WILLNEED)
        part.madvise(mmap.MADV_RANDOM)
        with contextlib.suppress(OSError):  # before Linux 5.14 pages are mapped as they are touched
            part.madvise(_MADV_POPULATE_READ)
        return memoryview(part)[skipped:]

    def tensor(self, dtype: "torch.dtype", shape: tuple[int, ...], offset: int) -> "torch.Tensor":
        """A view of the owner's memory as a contiguous tensor, `offset` bytes from its start."""
        assert self.whole
        return view_as_tensor(self.buffer, dtype, shape, offset)

    def close(self) -> None:
        """Gives the memory back as soon as no tensor views it any more."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        # The mapping goes with its last view: closing it under a tensor is refused, and would be a crash.
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


def _open_unnamed(folder: Path) -> int:
    """A new file of the folder that can be read and written."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, name = tempfile.mkstemp(prefix="waferbox-", dir=folder)  # a file system that cannot do without a name
    os.unlink(name)
    return descriptor


def _seals(descriptor: int) -> int | None:
    """What memory is sealed against; None for what is not memory."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


@functools.cache
def _torch() -> ModuleType:
    """torch, imported by those who view memory as tensors.

    It warns, once in a process, that a tensor views bytes that cannot be written; nobody writes to what was received.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
    return torch


def view_as_tensor(
    buffer: "memoryview | bytearray", dtype: "torch.dtype", shape: tuple[int, ...], offset: int
) -> "torch.Tensor":
    """A tensor that views a buffer, `offset` bytes from its start."""
    torch = _torch()
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).reshape(shape)
