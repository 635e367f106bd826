"""The pages of a mapped file: calls that read them into memory, write them to the disk and evict them.

The calls matter for speed and room only: an access to a page that is not in memory reads it from the disk.
"""

import ctypes
import errno
import mmap
import os
import re
from typing import Final

import torch

from waferbox.links.shared_memory import SharedMemory

PAGE_BYTES: Final = mmap.PAGESIZE
LARGE_PAGE_BYTES: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_MADV_NOHUGEPAGE: Final = 15
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_PUNCH_HOLE_AND_KEEP_SIZE: Final = 3
_SYNC_FILE_RANGE_WAIT_BEFORE: Final = 1
_SYNC_FILE_RANGE_WRITE: Final = 2
_SYNC_FILE_RANGE_WAIT_AFTER: Final = 4
_SYNC_AND_WAIT: Final = _SYNC_FILE_RANGE_WAIT_BEFORE | _SYNC_FILE_RANGE_WRITE | _SYNC_FILE_RANGE_WAIT_AFTER

# Since Linux 5.18 a page fault where large pages are wanted reads as much as one of them, even from a file system that
# has none; before that, and without transparent huge pages, it would read 4 KB.
_LINUX: Final = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
_READS_LARGE: Final = _LINUX >= (5, 18) and os.path.exists("/sys/kernel/mm/transparent_hugepage")

# ctypes releases the interpreter lock during these calls; the methods of mmap hold it.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class FilePages:
    """The pages of a shared memory that is a file of this process. Extents are widened to whole pages."""

    def __init__(self, memory: SharedMemory) -> None:
        assert memory.in_file
        self._memory = memory
        self._large = False
        self._start = memory.tensor(torch.uint8, (1,), 0).data_ptr()

    def expect_calls(self, block_bytes: int) -> None:
        """Turns the kernel's own read-ahead off: from now on `read` brings the pages of blocks of this size.

        Otherwise the kernel reads the surroundings of a touched page too, on some machines megabytes. Where blocks are
        large enough, large pages are used, which take the kernel a fifth of the time.
        """
        self._advise(0, self._memory.nbytes, mmap.MADV_RANDOM)
        self._large = _READS_LARGE and block_bytes % LARGE_PAGE_BYTES == 0
        if self._large:
            self._advise(0, self._memory.nbytes, _MADV_HUGEPAGE)

    def expect_touches(self) -> None:
        """Ends `expect_calls`."""
        self._advise(0, self._memory.nbytes, mmap.MADV_NORMAL)
        if self._large:
            self._advise(0, self._memory.nbytes, _MADV_NOHUGEPAGE)
        self._large = False

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Begins to read pages from the disk; has no effect on large pages, which are read one by one anyway."""
        if not self._large:
            os.posix_fadvise(self._memory.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, nbytes: int, *, for_writing: bool) -> None:
        """Waits until pages are in memory and mapped. Raises OSError: the disk fails."""
        advice = _MADV_POPULATE_WRITE if for_writing else _MADV_POPULATE_READ
        error = self._advise(offset, nbytes, advice)
        # EINVAL: Linux before 5.14 has no such advice, and reads pages when they are touched.
        if error not in (0, errno.EINVAL):
            raise OSError(error, f"the file of the states cannot be read: {os.strerror(error)}")

    def start_writing(self, offset: int, nbytes: int) -> None:
        """Begins to write changed pages to the disk."""
        self._write(offset, nbytes, _SYNC_FILE_RANGE_WRITE)

    def evict(self, offset: int, nbytes: int) -> bool:
        """Writes pages to the disk and evicts them from memory. Returns whether none is left in memory.

        Pages that another process has mapped stay.
        """
        self._write(offset, nbytes, _SYNC_AND_WAIT)
        self._advise(offset, nbytes, mmap.MADV_DONTNEED)  # The mapping is shared, so no change is lost.
        first, length = _whole_pages(offset, nbytes)
        os.posix_fadvise(self._memory.fileno(), first, length, os.POSIX_FADV_DONTNEED)
        return not self.resident_bytes(offset, nbytes)

    def resident_bytes(self, offset: int, nbytes: int) -> int:
        """Returns how much of an extent is in memory."""
        first, length = _whole_pages(offset, nbytes)
        found = torch.empty(-(-length // PAGE_BYTES), dtype=torch.uint8)
        if _libc.mincore(self._start + first, length, found.data_ptr()):
            _raise()
        return int((found & 1).sum()) * PAGE_BYTES

    def _advise(self, offset: int, nbytes: int, advice: int) -> int:
        first, length = _whole_pages(offset, nbytes)
        return ctypes.get_errno() if _libc.madvise(self._start + first, length, advice) else 0

    def _write(self, offset: int, nbytes: int, flags: int) -> None:
        _sync_range(self._memory.fileno(), *_whole_pages(offset, nbytes), flags)


class PassingFile:
    """A file that is written once, from its start to its end, with few of its pages in memory meanwhile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last: tuple[int, int] | None = None  # whole pages, on their way to the disk

    def written(self, offset: int, nbytes: int) -> None:
        """Begins to write an extent to the disk, and evicts the one before."""
        whole = _whole_pages(offset, nbytes)
        _sync_range(self._descriptor, *whole, _SYNC_FILE_RANGE_WRITE)
        if self._last is not None:
            _sync_range(self._descriptor, *self._last, _SYNC_AND_WAIT)
            os.posix_fadvise(self._descriptor, *self._last, os.POSIX_FADV_DONTNEED)
        self._last = whole


def discard_pages(memory: SharedMemory, offset: int, nbytes: int) -> None:
    """Frees the memory and the disk space of the whole pages within an extent; their bytes are zero then."""
    first = -(-offset // PAGE_BYTES) * PAGE_BYTES
    length = (offset + nbytes) // PAGE_BYTES * PAGE_BYTES - first
    if length > 0 and _libc.fallocate(memory.fileno(), _PUNCH_HOLE_AND_KEEP_SIZE, first, length):
        number = ctypes.get_errno()
        if number != errno.EOPNOTSUPP:
            _raise()


def _sync_range(descriptor: int, offset: int, nbytes: int, flags: int) -> None:
    if _libc.sync_file_range(descriptor, offset, nbytes, flags):
        _raise()


def _whole_pages(offset: int, nbytes: int) -> tuple[int, int]:
    skipped = offset % PAGE_BYTES
    return offset - skipped, -(-(nbytes + skipped) // PAGE_BYTES) * PAGE_BYTES


def _raise() -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"the file of the states fails: {os.strerror(number)}")
