"""Which processes of a cluster live and are no nodes any more: their interpreters hang, or they are suspended.

Management has taken them for dead; their launcher has to end them, so that others can have their places.
"""

from collections.abc import Collection, Iterable

LOOK_SECONDS = 5.0  # between two looks


class Liveness:
    """Counts looks rather than seconds: while this process is suspended nobody falls silent. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        """seconds: that a process which was a node may be none."""
        self.seconds = seconds
        self._silent: dict[int, int] = {}  # looks, by process id, of those that have been nodes

    def look(self, running: Collection[int], registered: Iterable[int]) -> list[int]:
        """Process ids: those that are to run, and those that management knows. Returns who has been silent too long."""
        for pid in registered:
            self._silent[pid] = -1
        self._silent = {pid: looks + 1 for pid, looks in self._silent.items() if pid in running}
        return [pid for pid, looks in self._silent.items() if looks * LOOK_SECONDS >= self.seconds]
