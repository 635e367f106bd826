"""An event loop for gRPC, and the thread that runs it."""

import asyncio
import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from waferbox.host.event_loop import SteadyClock, SteadyEventLoop
from waferbox.host.threads import GuardedThread

_Result = TypeVar("_Result")

SETTLE_SECONDS: Final = 1.0  # for calls that have ended with their server to be over


class LoopThread:
    """An event loop and its thread. Used by one thread, beside that of the loop."""

    def __init__(self, *, name: str, on_defect: Callable[[Exception], None], clock: SteadyClock | None = None) -> None:
        """Makes the loop, which does not run yet.

        Args:
            name: of the thread.
            on_defect: as of GuardedThread.
            clock: of the event loop, for what measures time.
        """
        self._loop = SteadyEventLoop(clock or SteadyClock())
        self._thread = GuardedThread(self._run_until_stopped, name=name, on_defect=on_defect)
        self._process = os.getpid()
        self._submitted: set[concurrent.futures.Future[Any]] = set()  # those that are not done

    def start(self) -> None:
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _Result], timeout_seconds: float | None = None) -> _Result:
        """Runs a coroutine in the event loop, and returns its result. Not to be called in the loop's own thread."""
        if self._thread.is_alive():
            return self.submit(coroutine).result(timeout_seconds)
        return self._loop.run_until_complete(coroutine)

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> "concurrent.futures.Future[_Result]":
        """Begins a coroutine in the event loop, after `start`, from any thread.

        Returns the future of its result, which is cancelled if the loop ends before.
        """
        future: concurrent.futures.Future[_Result]
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            future = concurrent.futures.Future()
            future.cancel()
            return future
        self._submitted.add(future)
        future.add_done_callback(self._submitted.discard)
        if self._loop.is_closed():  # meanwhile, perhaps before the future was among the submitted ones
            future.cancel()
        return future

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Calls a function in the event loop, after `start`, from any thread. Does not wait. No effect after `stop`."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    @property
    def is_running(self) -> bool:
        """Whether the thread runs the loop."""
        return self._thread.is_alive()

    @property
    def is_parents(self) -> bool:
        """Whether this process was forked from the one with the loop, which does not run here."""
        return os.getpid() != self._process

    def stop(self) -> None:
        """Ends the thread and all tasks of the loop. No effect in a forked process, nor in further calls."""
        if self._loop.is_closed() or self.is_parents:
            return
        if self._thread.is_alive():
            self.call_soon(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():  # the thread was not started, or has ended with a defect
            self._settle()

    def _run_until_stopped(self) -> None:
        self._loop.run_forever()
        # In this thread, as that of a notebook's script has a running event loop of its own.
        self._settle()

    def _settle(self) -> None:
        self._loop.run_until_complete(_settle())
        self._loop.close()
        for future in list(self._submitted):  # what came too late to become a task
            future.cancel()


async def _settle() -> None:
    """Ends all tasks of the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    # gRPC prints a traceback where a task of its own is cancelled otherwise than by the end of its call.
    calls = [task for task in tasks if getattr(task.get_coro(), "__name__", "") == "_schedule_rpc_coro"]
    if calls:
        await asyncio.wait(calls, timeout=SETTLE_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
