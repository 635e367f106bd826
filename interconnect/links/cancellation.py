"""The end of a job, which makes those give up who still wait on its behalf."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Ending:
    """Begins at most once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = False
        self._waits: set[Callable[[], None]] = set()

    @property
    def begun(self) -> bool:
        return self._begun

    def begin(self) -> None:
        """Make all waits give up, those to come too."""
        with self._lock:
            self._begun = True
            for give_up in self._waits:
                give_up()

    @contextmanager
    def ends(self, give_up: Callable[[], None]) -> Iterator[None]:
        """A wait in the body ends early by give_up(), called from another thread. It must not block, nor raise."""
        with self._lock:
            if self._begun:
                give_up()
            self._waits.add(give_up)
        try:
            yield
        finally:
            with self._lock:
                self._waits.discard(give_up)
