"""Notices an execution that hangs: its thread has been busy with one thing for far too long.

A thread that waits owes nothing: for its peers, for a slow input_fn, for a client that runs a slow closure or sits in a
debugger. One that does not wait owes an end of what it does: a kernel, a copy, a send.
"""

import os
import time
from typing import Final

from nodes.telemetry.progress import Progress

HANG_VARIABLE: Final = "WAFERBOX_HANG_SECONDS"
DEFAULT_HANG_SECONDS: Final = 60.0
MAX_COUNTED_SECONDS: Final = 2.0  # between two looks; more has passed only where this process was suspended


def hang_seconds() -> float:
    """How long a role may be busy with one kernel, or silent, before it is said to hang.

    Raises:
        ValueError: the environment says something else than a positive number.
    """
    text = os.environ.get(HANG_VARIABLE)
    if text is None:
        return DEFAULT_HANG_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{HANG_VARIABLE}={text}: it must be a number of seconds greater than 0")
    return seconds


class ProgressWatchdog:
    """Of one execution. Used by one thread, about once a second."""

    def __init__(self, seconds: float) -> None:
        """seconds: as hang_seconds."""
        self._seconds = seconds
        self._seen: tuple[object, ...] | None = None
        self._looked = 0.0
        self._busy = 0.0

    def hangs(self, progress: Progress, *, waits: bool, moved_bytes: int) -> bool:
        """Whether it has been busy for too long and nothing came of it.

        waits: whether it waits for somebody else now. moved_bytes: received and sent until now.
        """
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        seen = (progress.step, progress.wait, progress.send, moved_bytes)
        if waits or seen != self._seen:
            self._seen, self._busy = seen, 0.0
        else:
            self._busy += min(passed, MAX_COUNTED_SECONDS)
        return self._busy > self._seconds
