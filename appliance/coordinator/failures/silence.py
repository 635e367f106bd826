"""Which nodes owe a report and send none: a process whose interpreter hangs still answers at its socket."""

import threading
from collections.abc import Iterable


class SilenceWatch:
    """Counts ticks rather than seconds: while this process is suspended nobody else falls silent. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        """seconds: that a node may say nothing while it owes reports, with one tick in each; one at least."""
        self._max_ticks = max(1, round(seconds))
        self._lock = threading.Lock()
        self._silent: dict[str, int] = {}  # ticks, by node

    def heard(self, node: str) -> None:
        """The node has said something."""
        with self._lock:
            self._silent.pop(node, None)

    def words(self, node: str) -> str:
        """What is told of one that has been silent too long."""
        return f"{node} hangs: it has its connections and has said nothing for {self._max_ticks} s"

    def tick(self, owing: Iterable[str]) -> list[str]:
        """To be called once a second. Returns those of the nodes that owe reports which have been silent too long."""
        with self._lock:
            self._silent = {node: self._silent.get(node, 0) + 1 for node in owing}
            return [node for node, ticks in self._silent.items() if ticks > self._max_ticks]
