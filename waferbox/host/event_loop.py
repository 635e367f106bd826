"""What coroutines of an event loop wait for: changes of its state, and messages, also from threads."""

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, ParamSpec, TypeVar

_Value = TypeVar("_Value")
_Message = TypeVar("_Message")
_Parameters = ParamSpec("_Parameters")


# --- Changes of state -------------------------------------------------------------------------------------------------


class Changes:
    """The changes of a state, for which coroutines wait. Used in one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], None] = {}  # in the order of the waits

    def notify(self) -> None:
        """Makes all waits check their conditions again."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            _wake(future)

    async def until(self, ready: Callable[[], _Value], seconds: float | None = None) -> _Value:
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
            self._waiting[future] = None
            timer = None if deadline is None else loop.call_at(deadline, _wake, future)
            try:
                await future
            finally:
                self._waiting.pop(future, None)
                if timer is not None:
                    timer.cancel()
        return value


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


# --- Messages ---------------------------------------------------------------------------------------------------------


def from_any_thread(callback: Callable[_Parameters, object]) -> Callable[_Parameters, None]:
    """Returns a function for all threads, which makes the running event loop call this one. It never blocks."""
    loop = asyncio.get_running_loop()

    def call(*arguments: _Parameters.args, **named: _Parameters.kwargs) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(functools.partial(callback, *arguments, **named))

    return call


class Mailbox(Generic[_Message]):
    """A queue of messages from threads to a coroutine. To be made in the event loop that reads it. Thread-safe."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._messages: deque[_Message] = deque()
        self._closed = False

    def __len__(self) -> int:
        """The number of unread messages."""
        return len(self._messages)

    def put(self, message: _Message) -> None:
        """Adds a message, from any thread; never blocks. No effect once the mailbox is closed."""
        if self._closed:
            return
        self._messages.append(message)
        self._wake()

    def close(self) -> None:
        """Makes `messages` end after the messages that were put before. From any thread; never blocks."""
        self._closed = True
        self._wake()

    async def messages(self) -> AsyncIterator[_Message]:
        """All messages, until the mailbox is closed."""
        while True:
            closed = self._closed  # read first, so that no message that was put before the end is lost
            while self._messages:
                yield self._messages.popleft()
            if closed:
                return
            await self._changed.wait()
            self._changed.clear()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the reader
            self._loop.call_soon_threadsafe(self._changed.set)
