"""Which processes of a cluster live and are no nodes any more: their interpreters hang, or they are suspended.

Management has taken them for dead; their launcher has to end them, so that others can have their places.
"""

from collections.abc import Collection, Iterable

ProcessKey = tuple[str, int]  # its host, empty for this one, and its process id there

LOOK_SECONDS = 5.0  # between two looks


class Liveness:
    """Counts looks rather than seconds: while this process is suspended nobody falls silent. Not thread-safe."""

    def __init__(self, seconds: float) -> None:
        """seconds: that a process which was a node may be none."""
        self.seconds = seconds
        self._silent: dict[ProcessKey, int] = {}  # looks, of those that have been nodes

    def look(self, running: Collection[ProcessKey], registered: Iterable[ProcessKey]) -> list[ProcessKey]:
        """Those that are to run, and those that management knows. Returns who has been silent too long."""
        for key in registered:
            self._silent[key] = -1
        self._silent = {key: looks + 1 for key, looks in self._silent.items() if key in running}
        return [key for key, looks in self._silent.items() if looks * LOOK_SECONDS >= self.seconds]
