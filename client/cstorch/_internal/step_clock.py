"""The clock for measurements of scripts: while closures run, it shows the end of their step on the cluster.

Closures of several steps may run at once, so the time at which they run is not that of their steps.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_step: tuple[float, float] | None = None  # begin and end


def now() -> float:
    """Returns the time in seconds, as of time.monotonic."""
    return time.monotonic() if _step is None else _step[1]


def began() -> float:
    """Returns the begin of the step whose closures run, as of time.monotonic; the present time outside of closures.

    So a measurement that begins in a closure includes the closure's step.
    """
    return time.monotonic() if _step is None else _step[0]


@contextmanager
def closures_of_step(began: float, ended: float) -> Iterator[None]:
    """Context in which the closures of a step run. A process has one execution at a time.

    Args:
        began: The begin of the step, or the end of the step before, as of time.monotonic.
        ended: The end of the step.
    """
    global _step
    _step = began, ended
    try:
        yield
    finally:
        _step = None
