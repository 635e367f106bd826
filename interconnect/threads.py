"""Threads that tell of their defects: one that dies silently leaves others waiting for it."""

import logging
import threading
from collections.abc import Callable

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
