"""A process of a cluster that is restarted when it ends, until it has ended too often soon after its start."""

import time
from collections.abc import Callable, Sequence

from waferbox.cluster.launcher import Process
from waferbox.launch.spawn import SpawnError

EARLY_EXIT_SECONDS = 5.0
MAX_EARLY_EXITS = 5  # in a row
DELAY_SECONDS = 1.0  # before the start that follows two early exits in a row; doubled by each further one


class RestartBackoff:
    """The delay before the next start of a process, from its early exits in a row. Not thread-safe."""

    def __init__(self) -> None:
        self._early_exits = 0  # in a row
        self.begin()

    def begin(self) -> None:
        """Notes that a process is started now."""
        self._began = time.monotonic()

    def end(self) -> float | None:
        """Notes that the process has ended; returns the seconds before the next start, None if it ended too often."""
        self._early_exits = self._early_exits + 1 if time.monotonic() - self._began < EARLY_EXIT_SECONDS else 0
        if self._early_exits >= MAX_EARLY_EXITS:
            return None
        return DELAY_SECONDS * 2 ** (self._early_exits - 2) if self._early_exits >= 2 else 0.0


EXITED_TOO_OFTEN = f"{MAX_EARLY_EXITS} times in a row within {EARLY_EXIT_SECONDS:g} s of its start"


class SupervisedProcess:
    """A process of a cluster that is restarted when it ends. Not thread-safe."""

    def __init__(self, module: str, start: Callable[[], Process]) -> None:
        """Starts the process.

        Args:
            module: its module, for messages.
            start: starts it, now and later. What it raises now, the constructor raises.
        """
        self.module = module
        self.given_up = False
        self.restart_at: float | None = None  # monotonic; None: a process runs, or none is started any more
        self._start = start
        self._what_ended = ""  # the first part of the message about the restart
        self._backoff = RestartBackoff()
        self.process: Process | None = start()

    def restart_if_ended(self) -> Sequence[str]:
        """Restarts the process if it has ended and its delay is over; returns messages for the user."""
        messages: list[str] = []
        if self.process is not None and (status := self.process.poll()) is not None:
            name = described(self.process)
            self.process.close()
            self.process = None
            messages += self._ended(f"{self.module} ({name}) ended with status {status}")
        if self.restart_at is not None and self.restart_at <= time.monotonic():
            messages += self._restart()
        return messages

    def replace(self, why: str) -> None:
        """Ends the process, which hangs; restart_if_ended starts another. why: the predicate of the message."""
        assert self.process is not None
        name = described(self.process)
        self.process.close()
        self.process = None
        self._what_ended = f"{self.module} ({name}) {why}"
        # A hang takes long, so that it breaks a row of early exits and needs no delay.
        self._backoff.end()
        self.restart_at = time.monotonic()

    def reset_backoff(self) -> None:
        """Forgets early exits, which were due to the end of the launcher."""
        self._backoff = RestartBackoff()

    def close(self) -> None:
        """Ends the process, and starts no other."""
        self.restart_at = None
        if self.process is not None:
            self.process.close()

    def _ended(self, what: str) -> Sequence[str]:
        """Schedules the next start, or gives the process up; returns messages for the user."""
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
    """The process's id and host, for messages."""
    if not process.pid:
        return "a process that has not started yet"
    return f"pid {process.pid} at {process.host}" if process.host else f"pid {process.pid}"
