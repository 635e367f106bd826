"""A cancellation token: has those give up who wait on behalf of a job that has ended."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CancellationToken:
    """Is cancelled at most once, from any thread, and stays so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: set[Callable[[], None]] = set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Make all waits give up, those to come too."""
        with self._lock:
            self._cancelled = True
            for callback in self._callbacks:
                callback()

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Calls back, in the cancelling thread, if it happens in the body; at once if it has. No callback may block."""
        with self._lock:
            if self._cancelled:
                callback()
            self._callbacks.add(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.discard(callback)
