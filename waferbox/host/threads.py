"""Threads that report their defects, a thread for calls that block, and the token that ends waits for ended jobs."""

import asyncio
import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_Result = TypeVar("_Result")

# --- Guarded threads --------------------------------------------------------------------------------------------------
#
# A thread that dies silently leaves others waiting for it.


logger = logging.getLogger(__name__)


class GuardedThread(threading.Thread):
    """A daemon thread that reports an unexpected exception of its target to the owner of the work.

    `on_defect` is called last, in this thread; it has to end the waits for the thread. The target handles expected
    errors, such as a closed connection or the end of a job.
    """

    def __init__(self, target: Callable[[], None], *, name: str, on_defect: Callable[[Exception], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = target
        self._on_defect = on_defect

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:
            logger.exception("A defect in thread %s", self.name)
            self._on_defect(error)


# --- What blocks ------------------------------------------------------------------------------------------------------


class SerialThread:
    """A daemon thread that calls functions which block, one after the other, for an event loop or another thread.

    An executor's threads would keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], concurrent.futures.Future[object]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def run(self, function: Callable[[], _Result]) -> _Result:
        """Calls the function in the thread, and returns its result.

        If the caller is cancelled, a function that has begun goes on, and its result is dropped.
        """
        return await asyncio.wrap_future(self.submit(function))

    def submit(self, function: Callable[[], _Result]) -> "concurrent.futures.Future[_Result]":
        """Begins a call of the function in the thread. Returns the future of its result."""
        future: concurrent.futures.Future[_Result] = concurrent.futures.Future()
        self._calls.put((function, future))  # type: ignore[arg-type]  # the result of each is of its own type
        return future

    def close(self) -> None:
        """Ends the thread after all calls that were made. Does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        for function, future in iter(self._calls.get, None):
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - passed on, as an executor does
                future.set_exception(error)


# --- Cancellation -----------------------------------------------------------------------------------------------------


class CancellationToken:
    """The end of a job, for the waits on its behalf, which give up then. Thread-safe.

    A token is cancelled at most once, and stays cancelled.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._callbacks: set[Callable[[], None]] = set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Ends all waits, later ones included."""
        with self._lock:
            self._cancelled = True
            for callback in self._callbacks:
                callback()

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Calls `callback` when the token is cancelled within the body, or at once if it was before.

        The cancelling thread makes the call, so the callback must not block.
        """
        with self._lock:
            if self._cancelled:
                callback()
            self._callbacks.add(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.discard(callback)
