"""Memory of a link that passes on, by reference, what came to this process as bytes."""

from typing import Final

from interconnect.links.shared_memory import SharedMemory, Slice

ARENA_BYTES: Final = 16 * 1024 * 1024
ALIGNMENT: Final = 64


class RelayBuffers:
    """A place for each group.

    One is enough, as it is for whoever sends the group first: that process sends other bytes only when what it sent
    before has been read. The groups that may run further ahead are those that stay bytes.
    """

    def __init__(self) -> None:
        self._arenas: list[SharedMemory] = []
        self._free = 0  # bytes at the end of the last arena
        self._places: dict[int, Slice] = {}

    def place(self, group: int, payload: memoryview) -> Slice:
        """Copies a group to its place."""
        place = self._places.get(group)
        if place is None or place.nbytes != len(payload):
            place = self._places[group] = self._take(len(payload))
        place.view[:] = payload
        return place

    def close(self) -> None:
        """Gives the memory back."""
        self._places.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
        self._free = 0

    def _take(self, nbytes: int) -> Slice:
        rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if rounded > self._free:
            self._free = max(ARENA_BYTES, rounded)
            self._arenas.append(SharedMemory.create(self._free))
        arena = self._arenas[-1]
        place = Slice(arena, arena.nbytes - self._free, nbytes)
        self._free -= rounded
        return place
