"""Cell: the identity of one device tensor's storage, and where its bytes are: in memory, in a spool file, or on the
cluster.
"""

import contextlib
import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from cstorch._internal.tracing.initialisation import Initialisation

# --- Where the bytes of large tensors are while no operation uses them: one temporary file without a name -------------
#
# The file is unlinked when it is made, so that nothing stays on the disk however the process ends. It only grows, and
# is
# sparse: what was never written, or was given back, takes no room.


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


# --- Cell: the identity of one device tensor's storage, and where its bytes are ---------------------------------------


RAM_BYTES = 64 * 1024
"""Smaller cells stay in memory; larger ones are spooled to a file and mapped only while an operation uses them."""


Fetch = Callable[[], Iterator[torch.Tensor]]
"""Gets a value from the cluster, in CPU tensors that lie one below the other along the first dimension; or raises."""


class Cell:
    """One storage of the device, seen from the client.

    All tensors that share the storage (a parameter, its views, its detached aliases) share the cell, so a state tensor
    is known by its cell. A new cell is filled with zeros and takes no room until it is written.

    The bytes are here (in memory or in the spool), or on the cluster: after `set_remote` the next read fetches them. Or
    there are none yet, and `initialisation` says how they will be made: by the next read, or on the cluster. It stays
    when they are read (`is_made`), and goes when they are written.
    `version` counts the writes by the client: whoever keeps a copy elsewhere sees whether it is out of date.
    `changes_in_steps` says that a traced step gives it new values.
    """

    __slots__ = (
        *("__weakref__", "_fetch", "_finalizer", "_initialisation", "_memory", "_offset", "_view"),
        *("changes_in_steps", "dtype", "is_made", "shape", "version"),
    )

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.version = 0
        self.changes_in_steps = False
        self._memory: torch.Tensor | None = None
        self._offset: int | None = None
        self._finalizer: weakref.finalize | None = None  # type: ignore[type-arg]
        self._view: weakref.ref[torch.Tensor] | None = None
        self._fetch: Fetch | None = None
        self._initialisation = Initialisation(self.numel, dtype) if self.nbytes >= RAM_BYTES else None
        self.is_made = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def remote(self) -> bool:
        """True while the current value is on the cluster only."""
        return self._fetch is not None

    @property
    def is_untouched(self) -> bool:
        """True if the value is that of a new cell, zeros, and has no bytes anywhere."""
        has_bytes = self._fetch is not None or self._memory is not None or self._offset is not None
        return not has_bytes and (self._initialisation is None or self._initialisation.is_zero)

    def pieces(self) -> Iterator[torch.Tensor]:
        """The value as CPU tensors to be read only, one below the other along the first dimension.

        What is on the cluster comes piece by piece, and does not stay here.
        """
        if self._fetch is None:
            yield self.data()
        else:
            yield from self._fetch()

    @property
    def initialisation(self) -> Initialisation | None:
        """How the value is made, if that is known; small cells have bytes from the start."""
        return self._initialisation

    def initialise(self, made: Initialisation) -> None:
        """Say that the value is now what `made` makes. Frees the bytes."""
        self._free()
        self._fetch = None
        self._initialisation = made
        self.is_made = False
        self.version += 1

    def data(self) -> torch.Tensor:
        """A CPU tensor over the cell's own bytes, fetched first if they are remote.

        Keep it only as long as needed: it holds the mapping of a spooled cell. Who writes to it calls `touch`.
        """
        if self._fetch is not None:
            self._take(self._fetch)
        if self._initialisation is not None and not self.is_made:
            if not self._initialisation.is_zero:
                self._initialisation.run(self._local())
            self.is_made = True
        return self._local()

    def _take(self, fetch: Fetch) -> None:
        try:
            rows = 0
            for piece in fetch():
                target = self._local()
                if piece.shape != target.shape:
                    target = target[rows : rows + len(piece)]
                    rows += len(piece)
                assert piece.shape == target.shape
                target.copy_(piece)
        except BaseException:
            self.set_remote(fetch)
            raise
        self._fetch = None

    def read(self) -> torch.Tensor:
        """The value as a CPU tensor of its own."""
        return self.data().clone()

    def write(self, value: torch.Tensor) -> None:
        """Replace the value by that of a CPU tensor of the same shape and type."""
        checked = self._checked(value)
        self.forget()
        self._local().copy_(checked)
        self.version += 1

    def touch(self) -> None:
        """Say that the client wrote to `data()`."""
        self._initialisation = None
        self.version += 1

    def set_remote(self, fetch: Fetch) -> None:
        """Say that the current value is on the cluster, where `fetch` gets it. Frees the bytes."""
        self._free()
        self._fetch = fetch
        self._initialisation = None

    def forget(self) -> None:
        """Say that the whole value is about to be overwritten, so that it need not be fetched or made."""
        self._fetch = None
        self._initialisation = None

    def reshape(self, shape: tuple[int, ...]) -> None:
        """Give the same bytes another shape of as many elements."""
        assert math.prod(shape) == self.numel
        self.shape = tuple(shape)
        self._memory = self._memory.view(shape) if self._memory is not None else None
        self._view = None

    def _free(self) -> None:
        self._memory = None
        self._view = None
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
            self._offset = None

    def _checked(self, value: torch.Tensor) -> torch.Tensor:
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f"a tensor of shape {tuple(value.shape)} and type {value.dtype} cannot be stored in a device tensor of "
                f"shape {self.shape} and type {self.dtype}"
            )
        return value.detach()

    def _local(self) -> torch.Tensor:
        if self.nbytes < RAM_BYTES:
            if self._memory is None:
                self._memory = torch.zeros(self.shape, dtype=self.dtype, device="cpu")
            return self._memory
        view = self._view() if self._view is not None else None
        if view is None:
            if self._offset is None:
                self._offset = spool().allocate(self.nbytes)
                self._finalizer = weakref.finalize(self, spool().free, self._offset, self.nbytes)
                self._finalizer.atexit = False
            mapped = spool().map(self._offset, self.nbytes)
            view = torch.frombuffer(mapped, dtype=self.dtype, count=self.numel).view(self.shape)
            # Tensors over one mapping alias each other, as the device tensors that they stand for do.
            self._view = weakref.ref(view)
        return view
