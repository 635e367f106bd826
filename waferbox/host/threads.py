"""Threads that report their defects, and the token that ends waits on behalf of a job that has ended."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# --- Guarded threads --------------------------------------------------------------------------------------------------
#
# A thread that dies silently leaves others waiting for it.


logger = logging.getLogger(__name__)


class GuardedThread(threading.Thread):
    """A daemon thread that reports an unexpected exception of its target to the owner of the work.

    `on_defect` is called last, in this thread; it has to end the waits for the thread. The target handles expected
    errors, such as a closed connection or the end of a job.
    """

    def __init__(self, target: Callable[[], None], *, name: str, on_defect: Callable[[Exception], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = target
        self._on_defect = on_defect

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            logger.exception("A defect in thread %s", self.name)
            self._on_defect(error)


# --- Cancellation -----------------------------------------------------------------------------------------------------


class CancellationToken:
    """The end of a job, for the waits on its behalf, which give up then. Thread-safe.

    A token is cancelled at most once, and stays cancelled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: set[Callable[[], None]] = set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Ends all waits, later ones included."""
        with self._lock:
            self._cancelled = True
            for callback in self._callbacks:
                callback()

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Calls `callback` when the token is cancelled within the body, or at once if it was before.

        The cancelling thread makes the call, so the callback must not block.
        """
        with self._lock:
            if self._cancelled:
                callback()
            self._callbacks.add(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.discard(callback)
