"""Threads that tell of their defects: one that dies unheard leaves others waiting for what it will never do."""

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
