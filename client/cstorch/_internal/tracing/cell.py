"""Cell: the storage of device tensors, whose bytes are in memory, in the spool file, or on the cluster."""

import contextlib
import math
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator

import torch

from cstorch._internal.tracing.initialisation import Initialisation
from cstorch._internal.tracing.messages import sparse_value

_PAGE = mmap.ALLOCATIONGRANULARITY


class Spool:
    """A temporary file with the bytes of large tensors while no operation uses them. Thread-safe.

    The file has no name, so it disappears however the process ends. It only grows, but is sparse: ranges that were
    freed take no space on the disk.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file = tempfile.TemporaryFile(prefix="cstorch-")  # noqa: SIM115 - open as long as the process lives
        self._end = 0
        self._owner = os.getpid()

    def allocate(self, nbytes: int) -> int:
        """Returns the offset of a new range of `nbytes` zeros, which has its place on the disk.

        Raises:
            OSError: The disk has no room. A write to a range without a place would end the process.
        """
        with self._lock:
            offset = self._end
            try:
                os.posix_fallocate(self._file.fileno(), offset, nbytes)
            except OSError as error:
                self._file.truncate(offset)
                folder = tempfile.gettempdir()
                free = shutil.disk_usage(folder).free
                raise OSError(
                    error.errno,
                    f"{folder} cannot take a tensor of {nbytes / 1e6:.2f} MB: {error.strerror} ({free / 1e6:.2f} MB "
                    "are free). Make room there, or set TMPDIR to another folder for the script",
                ) from None
            self._end += -(-nbytes // _PAGE) * _PAGE
            self._file.truncate(self._end)
        return offset

    def map(self, offset: int, nbytes: int) -> mmap.mmap:
        """Returns the range as shared memory; it is unmapped with its last reference."""
        return mmap.mmap(self._file.fileno(), nbytes, offset=offset)

    def free(self, offset: int, nbytes: int) -> None:
        """Frees the disk space of a range. The range is not allocated again."""
        if os.getpid() != self._owner:
            return  # a forked child shares the file, but the tensors are the parent's
        if not hasattr(mmap, "MADV_REMOVE") or self._file.closed:
            return
        # A file system that cannot punch holes frees the space at the end of the process.
        with contextlib.suppress(OSError), self.map(offset, nbytes) as mapped:
            mapped.madvise(mmap.MADV_REMOVE)


_spool: Spool | None = None
_spool_lock = threading.Lock()


def spool() -> Spool:
    """Returns the spool of this process; creates it at the first call."""
    global _spool
    with _spool_lock:
        if _spool is None:
            _spool = Spool()
        return _spool


# Smaller cells stay in memory; larger ones are in the spool file, and mapped only while an operation uses them.
RAM_BYTES = 64 * 1024

# Yields a value on the cluster, in CPU tensors along the first dimension; or raises.
Fetch = Callable[[], Iterator[torch.Tensor]]


class Cell:
    """One storage of the device, as the client sees it.

    All tensors that share the storage (a parameter, its views, its detached aliases) share the cell, which identifies a
    state. A new cell is filled with zeros and takes no space until it is written.

    The bytes are in this process (in memory or in the spool), or on the cluster: after `set_remote` the next read
    fetches them. Or there are no bytes yet, and the calls of `initialisation` will make them, in the next read or on
    the cluster. A read keeps the initialisation (`is_made`), a write discards it.

    version: The number of writes by the client; a copy with another version is out of date.
    changes_in_steps: Whether a traced step changes the value.
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
        """Whether the current value is on the cluster only."""
        return self._fetch is not None

    @property
    def is_untouched(self) -> bool:
        """Whether the value is that of a new cell, zeros, and has no bytes anywhere."""
        has_bytes = self._fetch is not None or self._memory is not None or self._offset is not None
        return not has_bytes and (self._initialisation is None or self._initialisation.is_zero)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yields the value as read-only CPU tensors along the first dimension.

        A value on the cluster is fetched piece by piece, and is not stored in this process.
        """
        if self._fetch is None:
            yield self.data()
        else:
            yield from self._fetch()

    @property
    def initialisation(self) -> Initialisation | None:
        """The calls that make the value; None if it has other bytes, as small cells always have."""
        return self._initialisation

    def initialise(self, made: Initialisation) -> None:
        """Replaces the value by that of an initialisation. Frees the bytes."""
        self._free()
        self._fetch = None
        self._initialisation = made
        self.is_made = False
        self.version += 1

    def data(self) -> torch.Tensor:
        """Returns a CPU tensor over the cell's own bytes, which are fetched first if they are remote.

        A caller keeps the tensor only while it uses it, since it holds the mapping of a spooled cell, and calls `touch`
        after a write to it.
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
        """Returns a copy of the value as a CPU tensor."""
        return self.data().clone()

    def write(self, value: torch.Tensor) -> None:
        """Replaces the value by that of a CPU tensor of the same shape and type, which is not sparse."""
        if value.layout is not torch.strided:
            raise sparse_value()
        checked = self._checked(value)
        self.forget()
        self._local().copy_(checked)
        self.version += 1

    def touch(self) -> None:
        """Counts a write of the client to `data()`."""
        self._initialisation = None
        self.version += 1

    def set_remote(self, fetch: Fetch) -> None:
        """Marks the current value as on the cluster, from where `fetch` gets it. Frees the bytes."""
        self._free()
        self._fetch = fetch
        self._initialisation = None

    def moved(self) -> "Cell | None":
        """Moves a value that is not in the spool to a new cell; None if it is there."""
        if self._offset is not None:
            return None
        other = Cell(self.shape, self.dtype)
        other._fetch, other._initialisation, other._memory = self._fetch, self._initialisation, self._memory
        self._fetch = self._initialisation = self._memory = None
        return other

    def forget(self) -> None:
        """Discards the value before it is overwritten as a whole, so that it is not fetched or made."""
        self._fetch = None
        self._initialisation = None

    def reshape(self, shape: tuple[int, ...]) -> None:
        """Gives the same bytes another shape with as many elements."""
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
            # All tensors over a cell share one mapping, so that writes to one are seen in the others.
            self._view = weakref.ref(view)
        return view
