"""The clock of a process, which a simulation replaces."""

import time
from typing import Protocol


class Clock(Protocol):
    """The clock of a process."""

    def monotonic(self) -> float:
        """Returns seconds since some moment, for the differences of two times; it is never set back."""

    def time_ns(self) -> int:
        """Returns nanoseconds since 1970, for times that are shown to people or compared across processes."""


class SystemClock:
    """The clock of this computer."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time_ns(self) -> int:
        return time.time_ns()


def seconds_since_1970(clock: Clock) -> float:
    """Returns the time of day in seconds."""
    return clock.time_ns() / 1e9
