"""A point share in the making: the states after one step are written to a file while further steps run."""

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from waferbox.states.layout import StateExtent
from waferbox.states.pager import Extent
from waferbox.states.point_file import PointWriter
from waferbox.states.state_memory import CHUNK_BYTES, TRANSFER_BYTES, StateMemory, StateSettings

PIECE_BYTES: Final = 1 << 20  # read and then written at a time: a piece fits in a processor's cache


class _Piece(NamedTuple):
    """Bytes of a state that are written next."""

    name: str
    offset: int  # within the state
    nbytes: int
    aside: bool  # whether they were copied aside


class PointShare:
    """All states of one process as they were after one step. Thread-safe.

    One thread writes the live states to a file. A step that is about to change a state which is not in the file yet
    copies it aside first; the copy is freed as soon as it is in the file. So steps do not wait for the disk, unless the
    states are paged themselves.
    """

    def __init__(
        self,
        extents: Mapping[str, StateExtent],
        live: StateMemory,
        on_read: Callable[[Extent], None],
        *,
        required: bool,
    ) -> None:
        """
        Args:
            extents: the states, in the order in which a step writes them as far as it is known, so that few are copied.
            live: the memory that the steps change.
            on_read: called with an extent of the live states after it was read.
            required: whether the share must not be given up.
        """
        self.extents = extents
        self.nbytes = sum(extent.nbytes for extent in extents.values())
        self.required = required
        self.unchanged = True  # whether no state has been written since
        self.complete = False  # the file has all states, and its name
        self._live = live
        self._on_read = on_read
        self._changed = threading.Condition()
        self._taken = dict.fromkeys(extents, 0)  # bytes of each state, from its start, that are written or aside
        # States with bytes that are neither; one that is partly written comes first.
        self._untouched = deque(name for name, extent in extents.items() if extent.nbytes)
        self._aside: StateMemory | None = None
        self._pieces: deque[_Piece] = deque()
        self._limit = None if live.pages is None else TRANSFER_BYTES
        self._aside_bytes = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the share is written or given up. If `unchanged` is False too, steps need not call `before_write`."""
        return self._ended

    def before_write(self, name: str, part: int = 0, count: int = 1) -> None:
        """Copies a state aside, up to the end of a part, so that the caller can write it."""
        self.unchanged = False
        if name in self.extents:
            self._take(name, -(-self.extents[name].nbytes * (part + 1) // count))

    def leave_live(self) -> None:
        """Copies all states aside that are not in the file yet: the live memory is about to be freed."""
        for name, extent in self.extents.items():
            self._take(name, extent.nbytes)

    def end(self) -> None:
        """Gives the share up unless it is written. The live states are not read after the call."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def write_to(self, file: PointWriter) -> None:
        """Writes and completes the file, unless `end` is called meanwhile. Raises OSError: the disk is full."""
        self._write_all(file)
        if not self._ended:
            file.complete()
            self.complete = True

    def close(self) -> None:
        """Ends the share and frees its memory, after `write_to`."""
        self.end()
        if self._aside is not None:
            self._aside.close()

    def _take(self, name: str, nbytes: int) -> None:
        """Copies a state aside, up to so many bytes of it."""
        extent = self.extents[name]
        while self._taken[name] < nbytes:
            with self._changed:
                self._changed.wait_for(lambda: self._limit is None or self._aside_bytes < self._limit or self._ended)
                if self._ended:
                    return
                done = self._taken[name]
                length = min(CHUNK_BYTES, extent.nbytes - done)
                if not length:
                    return
                if self._aside is None:
                    self._aside = StateMemory(self._live.nbytes, StateSettings(), "a recovery point")
                # A system call, as new pages would be mapped for one use only, which costs more than the copy.
                begin = extent.offset + done
                count = os.pwrite(self._aside.memory.fileno(), self._live.memory.view(begin, length), begin)
                assert count == length, "memory takes all"
                self._taken[name] = done + length
                self._pieces.append(_Piece(name, done, length, aside=True))
                self._aside_bytes += length

    # --- In the thread that writes ------------------------------------------------------------------------------------

    def _write_all(self, file: PointWriter) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while (piece := self._next(buffer)) is not None:
            if piece.aside:
                self._write_aside(file, piece, buffer)
            else:
                file.write(piece.name, piece.offset, buffer[: piece.nbytes])

    def _next(self, buffer: memoryview) -> _Piece | None:
        """Returns a piece that was copied aside, or else the next piece of the live states."""
        with self._changed:
            while not self._ended:
                if self._pieces:
                    return self._pieces.popleft()
                if not self._untouched:
                    return None
                name = self._untouched[0]
                extent, done = self.extents[name], self._taken[name]
                length = min(len(buffer), extent.nbytes - done)
                if not length:
                    self._untouched.popleft()
                    continue
                _read(self._live, extent.offset + done, buffer[:length])
                if self._live.pages is not None:
                    self._on_read((extent.offset + done, length))
                self._taken[name] = done + length
                return _Piece(name, done, length, aside=False)
        return None

    def _write_aside(self, file: PointWriter, piece: _Piece, buffer: memoryview) -> None:
        aside = self._aside
        assert aside is not None
        begin = self.extents[piece.name].offset + piece.offset
        for done in range(0, piece.nbytes, PIECE_BYTES):
            if self._ended:
                return
            part = buffer[: piece.nbytes - done]
            _read(aside, begin + done, part)
            file.write(piece.name, piece.offset + done, part)
        aside.discard((begin, piece.nbytes))
        with self._changed:
            self._aside_bytes -= piece.nbytes
            self._changed.notify_all()


def _read(memory: StateMemory, offset: int, target: memoryview) -> None:
    """Reads by a system call: the process then maps no pages of a file, and the kernel may evict them."""
    count = os.preadv(memory.memory.fileno(), [target], offset)
    assert count == len(target), "the states are there"
