"""The clock of what scripts measure: while closures run, it shows when the cluster was done with their step.

Closures of several steps run in a burst, and when they run says nothing of when their steps did.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_step: tuple[float, float] | None = None  # when it began, and when it ended


def now() -> float:
    """Seconds, as of time.monotonic."""
    return time.monotonic() if _step is None else _step[1]


def began() -> float:
    """When what is measured now began, as of time.monotonic: the step of the closures that run, or else this moment.

    A clock that a closure starts counts the step of the closure.
    """
    return time.monotonic() if _step is None else _step[0]


@contextmanager
def closures_of_step(began: float, ended: float) -> Iterator[None]:
    """While the closures of a step run in this process, which has one execution at a time.

    Args:
        began: when the step did, or the one before it ended, as of time.monotonic.
        ended: when the step did.
    """
    global _step
    _step = began, ended
    try:
        yield
    finally:
        _step = None
