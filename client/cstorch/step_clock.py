"""The clock of what scripts measure: while closures run, it shows when the cluster was done with their step.

Closures of several steps run in a burst, and when they run says nothing of when their steps did.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_step_ended: float | None = None


def now() -> float:
    """Seconds, as of time.monotonic."""
    return time.monotonic() if _step_ended is None else _step_ended


@contextmanager
def closures_of_step(ended: float) -> Iterator[None]:
    """While the closures of a step run in this process, which has one execution at a time.

    Args:
        ended: when the step did, as of time.monotonic.
    """
    global _step_ended
    _step_ended = ended
    try:
        yield
    finally:
        _step_ended = None
