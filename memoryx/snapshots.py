"""The snapshot that a shard keeps for the client between a checkpoint step and the end of the client's reading."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from interconnect.links.hub import Stopped
from memoryx.snapshot import Snapshot
from memoryx.store import StateStore


class Snapshots:
    """At most one snapshot: the execution waits, at the next checkpoint step, until the client has done with it."""

    def __init__(self, store: StateStore, announce: Callable[[int], None]) -> None:
        """announce(step) tells the coordinator that the snapshot can be read."""
        self._store = store
        self._announce = announce
        self._changed = threading.Condition()
        self._held: Snapshot | None = None
        self._readers = 0  # of the snapshot that is held, or that was held last
        self._interrupted = False

    def take(self, step: int) -> None:
        """Keep the state; waits until the snapshot before is released and read. Stopped when interrupted."""
        with self._changed:
            self._changed.wait_for(lambda: (self._held is None and not self._readers) or self._interrupted)
            if self._interrupted:
                raise Stopped
            self._held = self._store.snapshot(step)
        self._announce(step)

    @contextmanager
    def reading(self, step: int) -> Iterator[Snapshot]:
        """The snapshot of a step, which stays while it is read. KeyError if there is none of this step."""
        with self._changed:
            if self._held is None or self._held.step != step:
                raise KeyError(step)
            snapshot = self._held
            self._readers += 1
        try:
            yield snapshot
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers and self._held is not snapshot:
                    self._store.release(snapshot)
                self._changed.notify_all()

    def release(self, step: int) -> None:
        """The client does not want this snapshot any more. Never blocks: a reading that is not over frees it."""
        with self._changed:
            if self._held is not None and self._held.step == step:
                self._let_go()

    def interrupt(self) -> None:
        """Make take raise Stopped, until reset."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Before another execution: drop what is left of the one before."""
        with self._changed:
            self._interrupted = False
            if self._held is not None:
                self._let_go()

    def _let_go(self) -> None:
        assert self._held is not None
        snapshot, self._held = self._held, None
        if not self._readers:
            self._store.release(snapshot)
        self._changed.notify_all()
