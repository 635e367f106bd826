"""Threads and timers that report their defects, and the token that ends waits on behalf of a job that has ended."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# --- Threads that tell of their defects: one that dies silently leaves others waiting for it --------------------------


logger = logging.getLogger(__name__)


class GuardedThread(threading.Thread):
    """A daemon thread that hands an exception which its target did not expect to whoever owns the work.

    `on_defect` is called in this thread, last; it makes those give up who wait for the thread. What the target expects
    (a closed connection, the end of a job) it handles itself.
    """

    def __init__(self, target: Callable[[], None], *, name: str, on_defect: Callable[[Exception], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = target
        self._on_defect = on_defect

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            logger.exception("a defect in thread %s", self.name)
            self._on_defect(error)


class GuardedTimer(GuardedThread):
    """Calls its target after some seconds, unless it is cancelled before."""

    def __init__(
        self, seconds: float, target: Callable[[], None], *, name: str, on_defect: Callable[[Exception], None]
    ) -> None:
        self._cancelled = threading.Event()

        def wait_and_call() -> None:
            if not self._cancelled.wait(seconds):
                target()

        super().__init__(wait_and_call, name=name, on_defect=on_defect)

    def cancel(self) -> None:
        """Has no effect once the target is called; more than once does no harm."""
        self._cancelled.set()


# --- A cancellation token: has those give up who wait on behalf of a job that has ended -------------------------------


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
