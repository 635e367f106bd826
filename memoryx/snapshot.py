"""The states as they were after one step, while steps go on."""

import threading
from collections.abc import Callable, Mapping

from interconnect.links.shared_memory import Slice
from memoryx.files.accesses import Extent
from memoryx.files.place import Place
from memoryx.files.state_memory import CHUNK_BYTES, StateMemory


class Snapshot:
    """All states as they were after one step. Thread-safe.

    At first it is the live states. A state is copied aside when somebody reads it, or just before it is written,
    whichever is first; who comes second helps the first, so no step waits for a reader.
    """

    def __init__(
        self,
        step: int,
        places: Mapping[str, Place],
        live: StateMemory,
        aside: StateMemory,
        on_read: Callable[[Extent], None],
    ) -> None:
        """aside: memory as large as the live one. on_read(extent): a reader has touched the live states there."""
        self.step = step
        self.places = places
        self.aside = aside
        self._live = live
        self._on_read = on_read
        self._lock = threading.Lock()
        self._copied: dict[str, int] = {}  # bytes of a state, from its start

    def part(self, name: str, offset: int, nbytes: int) -> Slice:
        """Some bytes of a state, which stay as long as the snapshot does."""
        place = self.places[name]
        before = self._copied.get(name, 0)
        self._copy(name, offset + nbytes)
        if before < offset + nbytes:
            self._on_read((place.offset + before, offset + nbytes - before))
        return Slice(self.aside.memory, place.offset + offset, nbytes)

    def before_write(self, name: str, part: int = 0, count: int = 1) -> None:
        """Keep what a state is now, up to the end of this part of it; it may be written then."""
        if name in self.places:
            self._copy(name, -(-self.places[name].nbytes * (part + 1) // count))

    def _copy(self, name: str, nbytes: int) -> None:
        place = self.places[name]
        while self._copied.get(name, 0) < nbytes:
            with self._lock:
                done = self._copied.get(name, 0)
                length = min(CHUNK_BYTES, place.nbytes - done)
                if length:
                    self.aside.copy_from(self._live, place.offset + done, place.offset + done, length)
                    self._copied[name] = done + length
