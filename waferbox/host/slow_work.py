"""Reports on work that takes long: after two seconds, then at growing intervals."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Final

SLOW_SECONDS: Final = 2.0  # what takes longer is shown
INTERVALS: Final = (SLOW_SECONDS, 5.0, 10.0)  # before each report; the last one repeats


@contextmanager
def reported(report: Callable[[], None], intervals: Sequence[float] = INTERVALS) -> Iterator[None]:
    """Context whose work is reported while it goes on.

    Args:
        report: called by a thread of its own, never after the end of the context; once, at the begin, if no thread can
            be started.
        intervals: the seconds before each call; the last of them repeats.
    """
    ended = Event()

    def follow() -> None:
        for seconds in itertools.chain(intervals, itertools.repeat(intervals[-1])):
            if ended.wait(seconds):
                return
            report()

    thread = Thread(target=follow, name="slow work", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at the end of the interpreter, since Python 3.12, or for want of threads
        report()
        yield
        return
    try:
        yield
    finally:
        ended.set()
        thread.join()
