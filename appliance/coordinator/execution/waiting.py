"""Waits of coroutines for a change of the job, which end early when the job fails, the client leaves or a node dies."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from appliance.coordinator.execution.failures import JobFailed, Verdict

_T = TypeVar("_T")


class Abandoned(Exception):
    """Raised when the client has left the execution."""


class EpochOver(Exception):
    """Raised when the epoch cannot be completed: a node died, or a link is lost."""


class Changes:
    """The changes of a job's state, for which coroutines wait. Used in one event loop."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Makes all waits check their conditions again."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            _wake(future)

    async def until(self, ready: Callable[[], _T], seconds: float | None = None) -> _T:
        """Waits until ready() is true, which it becomes with a change only; returns its last value.

        Args:
            ready: the condition; its exceptions end the wait.
            seconds: after which the wait ends anyway; None: never.
        """
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        while not (value := ready()):
            if deadline is not None and loop.time() >= deadline:
                break
            future = loop.create_future()
            self._waiting.add(future)
            timer = None if deadline is None else loop.call_at(deadline, _wake, future)
            try:
                await future
            finally:
                self._waiting.discard(future)
                if timer is not None:
                    timer.cancel()
        return value


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


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
