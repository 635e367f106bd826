"""A place in a cluster: a process that is wanted there, and is started again where it ends by itself.

One that ends again and again soon after its start would do so for ever: after a while the place is given up.
"""

import time
from collections.abc import Callable, Sequence

from waferbox.cluster.launcher import Process
from waferbox.launch.spawn import SpawnError

EARLY_EXIT_SECONDS = 5.0
MAX_EARLY_EXITS = 5  # in a row
DELAY_SECONDS = 1.0  # before the start that follows two short lives in a row; twice as long after each further one


class RestartBackoff:
    """How long the processes of a place have lived, and so when the next may be started. Not thread-safe."""

    def __init__(self) -> None:
        self._short = 0  # in a row
        self.begin()

    def begin(self) -> None:
        """A process is started now."""
        self._began = time.monotonic()

    def end(self) -> float | None:
        """The process has ended; returns in how many seconds another may be started. None: it would be futile."""
        self._short = self._short + 1 if time.monotonic() - self._began < EARLY_EXIT_SECONDS else 0
        if self._short >= MAX_EARLY_EXITS:
            return None
        return DELAY_SECONDS * 2 ** (self._short - 2) if self._short >= 2 else 0.0


EXITED_TOO_OFTEN = f"{MAX_EARLY_EXITS} times in a row within {EARLY_EXIT_SECONDS:g} s of its start"


class SupervisedProcess:
    """Not thread-safe."""

    def __init__(self, module: str, start: Callable[[], Process]) -> None:
        """start() starts the process; the first time here and now. Raises what start raises."""
        self.module = module
        self.given_up = False
        self.restart_at: float | None = None  # monotonic; None: there is a process, or there will not be one again
        self._start = start
        self._what_ended = ""  # for the message that says how it goes on
        self._backoff = RestartBackoff()
        self.process: Process | None = start()

    def restart_if_ended(self) -> Sequence[str]:
        """Start the process again if it has ended and it is time to; returns what users should be told."""
        told: list[str] = []
        if self.process is not None and (status := self.process.poll()) is not None:
            who = described(self.process)
            self.process.close()
            self.process = None
            told += self._ended(f"{self.module} ({who}) ended with status {status}")
        if self.restart_at is not None and self.restart_at <= time.monotonic():
            told += self._restart()
        return told

    def replace(self, why: str) -> None:
        """End the process, which does nothing any more; restart_if_ended starts another."""
        assert self.process is not None
        who = described(self.process)
        self.process.close()
        self.process = None
        self._what_ended = f"{self.module} ({who}) {why}"
        self._backoff.end()
        self.restart_at = time.monotonic()

    def reset_backoff(self) -> None:
        """That processes have ended here until now was the fault of what starts them."""
        self._backoff = RestartBackoff()

    def close(self) -> None:
        """End the process, and start no other."""
        self.restart_at = None
        if self.process is not None:
            self.process.close()

    def _ended(self, what: str) -> Sequence[str]:
        """Decide how it goes on."""
        self._what_ended = what
        delay = self._backoff.end()
        if delay is None:
            self.given_up = True
            return [f"{what}, {EXITED_TOO_OFTEN}: it is not started again"]
        self.restart_at = time.monotonic() + delay
        return []

    def _restart(self) -> Sequence[str]:
        self.restart_at = None
        self._backoff.begin()
        try:
            self.process = self._start()
        except SpawnError as error:
            return self._ended(f"{self.module} could not be started again ({error})")
        return [f"{self._what_ended}; started again as {described(self.process)}"]


def described(process: Process) -> str:
    """Which it is, for users."""
    if not process.pid:
        return "a process that is not there yet"
    return f"pid {process.pid} at {process.host}" if process.host else f"pid {process.pid}"
