"""A place in a cluster: a process that is wanted there, and is started again where it ends by itself.

One that ends again and again soon after its start would do so for ever: after a while the place is given up.
"""

import time
from collections.abc import Callable, Sequence

from nodes.launch.spawn import SpawnError
from waferbox.cluster.launcher import Process

SHORT_LIFE_SECONDS = 5.0
MAX_SHORT_LIVES = 5  # in a row
DELAY_SECONDS = 1.0  # before the start that follows two short lives in a row; twice as long after each further one


class Place:
    """Not thread-safe."""

    def __init__(self, module: str, start: Callable[[], Process]) -> None:
        """start() starts the process; the first time here and now. Raises what start raises."""
        self.module = module
        self.given_up = False
        self.restart_at: float | None = None  # monotonic; None: there is a process, or there will not be one again
        self._start = start
        self._short_lives = 0
        self._what_ended = ""  # for the message that says how it goes on
        self._started_at = time.monotonic()
        self.process: Process | None = start()

    def attend(self) -> Sequence[str]:
        """Start the process again if it has ended and it is time to; returns what users should be told."""
        told: list[str] = []
        if self.process is not None and (status := self.process.poll()) is not None:
            pid = self.process.pid
            self.process.close()
            self.process = None
            told += self._ended(f"{self.module} (pid {pid}) ended with status {status}")
        if self.restart_at is not None and self.restart_at <= time.monotonic():
            told += self._restart()
        return told

    def close(self) -> None:
        """End the process, and start no other."""
        self.restart_at = None
        if self.process is not None:
            self.process.close()

    def _ended(self, what: str) -> Sequence[str]:
        """Decide how it goes on."""
        now = time.monotonic()
        self._what_ended = what
        self._short_lives = self._short_lives + 1 if now - self._started_at < SHORT_LIFE_SECONDS else 0
        if self._short_lives >= MAX_SHORT_LIVES:
            self.given_up = True
            self.restart_at = None
            times = f"{MAX_SHORT_LIVES} times in a row within {SHORT_LIFE_SECONDS:g} s of its start"
            return [f"{what}, {times}: it is not started again"]
        self.restart_at = now + (DELAY_SECONDS * 2 ** (self._short_lives - 2) if self._short_lives >= 2 else 0.0)
        return []

    def _restart(self) -> Sequence[str]:
        self.restart_at = None
        self._started_at = time.monotonic()
        try:
            self.process = self._start()
        except SpawnError as error:
            return self._ended(f"{self.module} could not be started again ({error})")
        return [f"{self._what_ended}; started again as pid {self.process.pid}"]
