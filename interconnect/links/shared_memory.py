"""Memory that processes of one host share: a sealed memfd, so that no file is ever left behind."""

import fcntl
import functools
import mmap
import os
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# A peer that could shrink the memory could kill whoever has mapped it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """A mapped piece of shared memory. Its owner makes it; a peer maps the file descriptor that came over a link."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Takes the descriptor over. Use `create` or `from_fd`."""
        self._descriptor = descriptor
        self.nbytes = nbytes
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
    def from_fd(cls, descriptor: int, nbytes: int) -> "SharedMemory":
        """Maps memory that another process made; takes the descriptor over.

        Raises:
            ValueError: the memory is smaller than said, or its owner could shrink it.
        """
        try:
            if nbytes <= 0 or os.fstat(descriptor).st_size < nbytes:
                raise ValueError(f"the shared memory has {os.fstat(descriptor).st_size} bytes, not {nbytes}")
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("the shared memory is not sealed")
            return cls(descriptor, nbytes)
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

    def tensor(self, dtype: "torch.dtype", shape: tuple[int, ...], offset: int) -> "torch.Tensor":
        """A view of the memory as a contiguous tensor, `offset` bytes from its start."""
        return view_as_tensor(self.buffer, dtype, shape, offset)

    def close(self) -> None:
        """Gives the memory back as soon as no tensor views it any more."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        # The mapping goes with its last view: closing it under a tensor is refused, and would be a crash.
        self.buffer = memoryview(b"")
        del self._map


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes in shared memory."""

    memory: SharedMemory
    offset: int
    nbytes: int

    @property
    def view(self) -> memoryview:
        return self.memory.buffer[self.offset : self.offset + self.nbytes]


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
