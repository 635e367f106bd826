"""Where the bytes of large tensors are while no operation uses them: one temporary file without a name.

The file is unlinked when it is made, so that nothing stays on the disk however the process ends. It only grows, and is
sparse: what was never written, or was given back, takes no room.
"""

import contextlib
import mmap
import os
import tempfile
import threading

_PAGE = mmap.ALLOCATIONGRANULARITY


class Spool:
    """Hands out ranges of the file. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = tempfile.TemporaryFile(prefix="cstorch-")  # noqa: SIM115 - open as long as the process lives
        self._end = 0
        self._owner = os.getpid()

    def allocate(self, nbytes: int) -> int:
        """The offset of a new range of `nbytes` zeros."""
        with self._lock:
            offset = self._end
            self._end += -(-nbytes // _PAGE) * _PAGE
            self._file.truncate(self._end)
        return offset

    def map(self, offset: int, nbytes: int) -> mmap.mmap:
        """The range as shared memory; it is unmapped when the last reference goes."""
        return mmap.mmap(self._file.fileno(), nbytes, offset=offset)

    def free(self, offset: int, nbytes: int) -> None:
        """Give the room of a range back. The range is not handed out again."""
        if os.getpid() != self._owner:
            return  # a forked child shares the file, but the tensors are the parent's
        if not hasattr(mmap, "MADV_REMOVE") or self._file.closed:
            return
        # Where the file system cannot punch holes, the room comes back when the process ends.
        with contextlib.suppress(OSError), self.map(offset, nbytes) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)


_spool: Spool | None = None
_spool_lock = threading.Lock()


def spool() -> Spool:
    """The spool of this process, made at first use."""
    global _spool
    with _spool_lock:
        if _spool is None:
            _spool = Spool()
        return _spool
