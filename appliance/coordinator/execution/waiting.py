"""Waiting for what nodes and the client do, which ends when the job fails, the client leaves, or the epoch is over."""

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from appliance.coordinator.execution.failures import JobFailed, Verdict

_T = TypeVar("_T")


class Abandoned(Exception):
    """The client has gone away from the execution."""


class EpochOver(Exception):
    """Somebody has died, or a link is lost: what was to be done with these nodes does not come to its end."""


class HasEnd(Protocol):
    """What a wait may be for."""

    @property
    def over(self) -> bool: ...


class Waiting:
    """A condition, and the reasons not to wait for it any longer. Thread-safe."""

    def __init__(self, verdict: Verdict, is_interrupted: Callable[[], bool]) -> None:
        """is_interrupted: whether somebody is missing."""
        self.changed = threading.Condition()
        self.abandoned = False
        self._verdict = verdict
        self._is_interrupted = is_interrupted

    def until(
        self, ready: Callable[[], _T | None], seconds: float | None = None, epoch: HasEnd | None = None
    ) -> _T | None:
        """Until ready() is true, or for so many seconds; returns what it was last. Raises JobFailed, Abandoned.

        Without a deadline it waits for nodes whose life and progress are watched: the verdict ends the wait.

        Args:
            epoch: what is waited for belongs to it; EpochOver is raised when it is over, or cannot come to its end.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        with self.changed:
            while True:
                if self._verdict.failure is not None:
                    raise JobFailed(self._verdict.failure)
                if self.abandoned:
                    raise Abandoned
                if epoch is not None and (epoch.over or self._is_interrupted()):
                    raise EpochOver
                value = ready()
                left = None if deadline is None else deadline - time.monotonic()
                if value or (left is not None and left <= 0):
                    return value
                self.changed.wait(left)

    def abandon(self) -> None:
        """The client has gone away: all waits raise Abandoned."""
        with self.changed:
            self.abandoned = True
            self.changed.notify_all()

    def wake(self) -> None:
        """Something has changed that somebody may wait for."""
        with self.changed:
            self.changed.notify_all()
