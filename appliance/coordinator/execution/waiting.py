"""Waits for nodes and the client that end early when the job fails, the client leaves, or the epoch is over."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from appliance.coordinator.execution.failures import JobFailed, Verdict
from waferbox.host.event_loop import Changes

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
    """The waits of one execution, which also end when the job, the execution or the epoch ends."""

    def __init__(self, changes: Changes, verdict: Verdict, is_interrupted: Callable[[], bool]) -> None:
        """is_interrupted: whether a node or a link is missing."""
        self.abandoned = False
        self._changes = changes
        self._verdict = verdict
        self._is_interrupted = is_interrupted

    async def until(self, ready: Callable[[], _T], seconds: float | None = None, epoch: HasEnd | None = None) -> _T:
        """As Changes.until.

        Nodes are watched for life and progress, so that the verdict ends a wait without a limit.

        Args:
            ready: the condition.
            seconds: as of Changes.until.
            epoch: the epoch that the condition belongs to, if any.

        Raises:
            JobFailed: the job has failed.
            Abandoned: the client has left.
            EpochOver: the epoch is over or interrupted.
        """

        def checked() -> _T:
            if self._verdict.failure is not None:
                raise JobFailed(self._verdict.failure)
            if self.abandoned:
                raise Abandoned
            if epoch is not None and (epoch.over or self._is_interrupted()):
                raise EpochOver
            return ready()

        return await self._changes.until(checked, seconds)

    def abandon(self) -> None:
        """Makes all waits raise Abandoned, as the client has left."""
        self.abandoned = True
        self._changes.notify()
