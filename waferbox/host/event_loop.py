"""What coroutines of an event loop wait for: changes of its state, messages, also from threads, and time."""

import asyncio
import contextlib
import functools
import selectors
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Generic, ParamSpec, TypeVar

from waferbox.host.clock import SystemClock

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
        if value := ready():
            return value
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        while deadline is None or loop.time() < deadline:
            future = loop.create_future()
            self._waiting[future] = None
            timer = None if deadline is None else loop.call_at(deadline, _wake, future)
            try:
                await future
            finally:
                self._waiting.pop(future, None)
                if timer is not None:
                    timer.cancel()
            if value := ready():
                break
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
        self._changed = asyncio.Event()
        self._wake = from_any_thread(self._changed.set)
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


# --- Time without suspensions -----------------------------------------------------------------------------------------

# A loop that does nothing for so long was suspended, as nothing in it blocks. It never waits longer at a time.
SUSPENDED_SECONDS: Final = 1.0


class SteadyClock(SystemClock):
    """The clock of this computer, whose monotonic time stands still while its event loop is suspended.

    Attributes:
        suspended: seconds of all suspensions. Its event loop adds them.
    """

    def __init__(self) -> None:
        self.suspended = 0.0

    def monotonic(self) -> float:
        return super().monotonic() - self.suspended


class SteadyEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while its process is suspended, as by SIGSTOP or with its machine.

    Of a suspension, at most twice SUSPENDED_SECONDS pass. When the process continues, the loop takes what others have
    sent meanwhile before anything else is due. So no lease expires, and no answer is too late, because of the
    suspension of the process that waits for it.
    """

    def __init__(self, clock: SteadyClock) -> None:
        """clock: has the time of the loop, for what is measured outside of it; of this loop alone."""
        self._clock = clock
        super().__init__(_SteadySelector(clock))

    def time(self) -> float:
        """Returns seconds, without those of suspensions."""
        return self._clock.monotonic()


class _SteadySelector(selectors.DefaultSelector):
    """A selector that counts the time in which its process was suspended."""

    def __init__(self, clock: SteadyClock) -> None:
        super().__init__()
        self._clock = clock
        self._returned = time.monotonic()

    def select(self, timeout: float | None = None) -> Any:
        # An event loop takes an early return without events for a wait that is not over.
        timeout = SUSPENDED_SECONDS if timeout is None else min(max(0.0, timeout), SUSPENDED_SECONDS)
        begin = time.monotonic()
        selected = super().select(timeout)
        end = time.monotonic()
        for seconds in (begin - self._returned, end - begin - timeout):
            if seconds > SUSPENDED_SECONDS:
                self._clock.suspended += seconds
        self._returned = end
        return selected
