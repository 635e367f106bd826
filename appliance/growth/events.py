"""A simulation of discrete events: processes that wait for time to pass, or for a count to be reached."""

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

# What a process yields: seconds that go by, or a count with the value that it waits for.
Wait: TypeAlias = "float | tuple[Count, int]"
Process: TypeAlias = Iterator[Wait]


class Count:
    """A number that only grows, and who waits for it."""

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock
        self._waiting: list[tuple[int, Process]] = []
        self.value = 0

    def add(self) -> None:
        """One more."""
        self.raise_to(self.value + 1)

    def raise_to(self, value: int) -> None:
        """At least so many."""
        if value <= self.value:
            return
        self.value = value
        ready = [process for awaited, process in self._waiting if awaited <= value]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] > value]
        for process in ready:
            self._clock.start(process)

    def wait(self, value: int, process: Process) -> None:
        self._waiting.append((value, process))


class Clock:
    """The time, in seconds, and what happens next. Equal times: in the order in which they were asked for."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.now = 0.0

    def at(self, time: float, call: Callable[[], None]) -> None:
        """Have something called then; not before now."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._numbers), call))

    def start(self, process: Process) -> None:
        """Let a process go on, now."""
        self.at(self.now, lambda: self._go_on(process))

    def run(self) -> None:
        """Until nothing can happen any more."""
        while self._queue:
            self.now, _, call = heapq.heappop(self._queue)
            call()

    def _go_on(self, process: Process) -> None:
        for wait in process:
            if isinstance(wait, tuple):
                count, value = wait
                if count.value < value:
                    count.wait(value, process)
                    return
            elif wait > 0:
                self.at(self.now + wait, lambda: self._go_on(process))
                return


class Line:
    """One direction of a host's link: what is handed over leaves in order, at its rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free = 0.0
        self.busy_seconds = 0.0

    def reserve(self, begin: float, nbytes: float) -> tuple[float, float]:
        """From when to when the line has so many bytes that are handed over at `begin`."""
        start = max(begin, self._free)
        seconds = nbytes / self._rate
        self.busy_seconds += seconds
        self._free = start + seconds
        return start, self._free
