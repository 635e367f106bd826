"""The states after one step, on their way into a file while steps go on."""

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from waferbox.states.layout import StateExtent
from waferbox.states.pager import Extent
from waferbox.states.point_file import PointWriter
from waferbox.states.state_memory import CHUNK_BYTES, TRANSFER_BYTES, StateMemory, StateSettings

PIECE_BYTES: Final = 1 << 20  # that are written at a time: they stay in a processor's cache for that


class _Piece(NamedTuple):
    """Bytes of a state to be written."""

    name: str
    offset: int  # within the state
    nbytes: int
    aside: bool  # copied there


class PointShare:
    """All states as they were after one step. Thread-safe.

    One thread writes them to a file from where they lie. Where a step is about to change a state that was not written
    yet, it is copied aside first, and its memory is given back as soon as it is in the file. So nobody waits for the
    disk, but where not even the states have room in memory.
    """

    def __init__(
        self, places: Mapping[str, StateExtent], live: StateMemory, on_read: Callable[[Extent], None], *, required: bool
    ) -> None:
        """
        places: in the order in which a step writes the states, as far as that is known: they are saved in this order.
        on_read(extent): the live states have been read there. required: whether it must not be given up.
        """
        self.places = places
        self.nbytes = sum(place.nbytes for place in places.values())
        self.required = required
        self.unchanged = True  # the states are still what they were
        self.complete = False  # all of it is in a file with its name
        self._live = live
        self._on_read = on_read
        self._changed = threading.Condition()
        self._taken = dict.fromkeys(places, 0)  # bytes of each state, from its start, that are written or aside
        self._untouched = deque(name for name, place in places.items() if place.nbytes)  # and what is begun, first
        self._aside: StateMemory | None = None
        self._pieces: deque[_Piece] = deque()
        self._limit = None if live.pages is None else TRANSFER_BYTES
        self._aside_bytes = 0
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether it is written, or given up: once `unchanged` is False, the states can change without a word to it."""
        return self._ended

    def before_write(self, name: str, part: int = 0, count: int = 1) -> None:
        """Keep what a state is now, up to the end of this part of it; it may be written then."""
        self.unchanged = False
        if name in self.places:
            self._take(name, -(-self.places[name].nbytes * (part + 1) // count))

    def leave_live(self) -> None:
        """Keep all that is not written yet: the memory that the states lie in is about to go."""
        for name, place in self.places.items():
            self._take(name, place.nbytes)

    def end(self) -> None:
        """It is written already, or nobody wants it any more. When this returns, the states are not read."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def write_to(self, file: PointWriter) -> None:
        """Make the file complete, unless the point is ended meanwhile. Raises OSError: the disk is full."""
        self._write_all(file)
        if not self._ended:
            file.complete()
            self.complete = True

    def close(self) -> None:
        """End it, and give its memory back. Nobody writes it any more."""
        self.end()
        if self._aside is not None:
            self._aside.close()

    def _take(self, name: str, nbytes: int) -> None:
        """Copy a state aside, up to so many bytes of it."""
        place = self.places[name]
        while self._taken[name] < nbytes:
            with self._changed:
                self._changed.wait_for(lambda: self._limit is None or self._aside_bytes < self._limit or self._ended)
                if self._ended:
                    return
                done = self._taken[name]
                length = min(CHUNK_BYTES, place.nbytes - done)
                if not length:
                    return
                if self._aside is None:
                    self._aside = StateMemory(self._live.nbytes, StateSettings(), "a recovery point")
                # Not by way of the mapping: to map new pages, which are used but once, costs more than the copying.
                begin = place.offset + done
                count = os.pwrite(self._aside.memory.fileno(), self._live.memory.view(begin, length), begin)
                assert count == length, "memory takes all"
                self._taken[name] = done + length
                self._pieces.append(_Piece(name, done, length, aside=True))
                self._aside_bytes += length

    # -- in the thread that writes

    def _write_all(self, file: PointWriter) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while (piece := self._next(buffer)) is not None:
            if piece.aside:
                self._write_aside(file, piece, buffer)
            else:
                file.write(piece.name, piece.offset, buffer[: piece.nbytes])

    def _next(self, buffer: memoryview) -> _Piece | None:
        """What is aside, whose memory is wanted back, or else the next bytes from where the states lie."""
        with self._changed:
            while not self._ended:
                if self._pieces:
                    return self._pieces.popleft()
                if not self._untouched:
                    return None
                name = self._untouched[0]
                place, done = self.places[name], self._taken[name]
                length = min(len(buffer), place.nbytes - done)
                if not length:
                    self._untouched.popleft()
                    continue
                _read(self._live, place.offset + done, buffer[:length])
                if self._live.pages is not None:
                    self._on_read((place.offset + done, length))
                self._taken[name] = done + length
                return _Piece(name, done, length, aside=False)
        return None

    def _write_aside(self, file: PointWriter, piece: _Piece, buffer: memoryview) -> None:
        aside = self._aside
        assert aside is not None
        begin = self.places[piece.name].offset + piece.offset
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
    """Not by way of the mapping: of a file, pages come and go as with any other reader."""
    count = os.preadv(memory.memory.fileno(), [target], offset)
    assert count == len(target), "the states are there"
