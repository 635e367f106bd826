"""Waits for nodes and the client that end early when the job fails, the client leaves, or the epoch is over."""

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from appliance.coordinator.execution.failures import JobFailed, Verdict

_T = TypeVar("_T")


class Abandoned(Exception):
    """Raised when the client has left the execution."""


class EpochOver(Exception):
    """Raised when the epoch cannot be completed: a node died, or a link is lost."""


class HasEnd(Protocol):
    """An epoch, as far as a wait depends on it."""

    @property
    def over(self) -> bool: ...


class Waiting:
    """A condition variable whose waits also end when the job, the execution or the epoch ends. Thread-safe."""

    def __init__(self, verdict: Verdict, is_interrupted: Callable[[], bool]) -> None:
        """is_interrupted: whether a node or a link is missing."""
        self.changed = threading.Condition()
        self.abandoned = False
        self._verdict = verdict
        self._is_interrupted = is_interrupted

    def until(
        self, ready: Callable[[], _T | None], seconds: float | None = None, epoch: HasEnd | None = None
    ) -> _T | None:
        """Waits until ready() is true; returns its last value.

        Args:
            ready: the condition; called with the lock held.
            seconds: timeout; None: none. Nodes are watched for life and progress, so that the verdict ends such a wait.
            epoch: the epoch that the condition belongs to, if any.

        Raises:
            JobFailed: the job has failed.
            Abandoned: the client has left.
            EpochOver: the epoch is over or interrupted.
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
        """Makes all waits raise Abandoned, as the client has left."""
        with self.changed:
            self.abandoned = True
            self.changed.notify_all()

    def wake(self) -> None:
        """Makes all waits check their conditions again."""
        with self.changed:
            self.changed.notify_all()
