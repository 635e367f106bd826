"""A gRPC server, and channels, on an event loop, for a process with many open streams; and messages from threads to a
coroutine.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Generic, TypeAlias, TypeVar

import grpc

from waferbox.host.threads import GuardedThread
from waferbox.rpc.server import SMALL_MESSAGE_BYTES, channel_options, server_options
from waferbox.security.guard import AsyncServerGuard, Guard
from waferbox.security.tls import open_async_channel

# ----------------------------------------------------------------------------------------------------------------------
# A gRPC server, and channels, on an event loop, for a process with many open streams: each costs a coroutine


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_Result = TypeVar("_Result")

STOP_SECONDS: Final = 5.0  # beyond the grace of stop: handlers that were cancelled have ended by then
SETTLE_SECONDS: Final = 1.0  # in which calls that were ended with the server are over


class AsyncServer:
    """Owns the event loop and its thread, from `start` until `stop`. `server` gets its services and ports before."""

    def __init__(
        self,
        *,
        on_defect: Callable[[Exception], None],
        max_message_bytes: int = SMALL_MESSAGE_BYTES,
        for_scripts: bool = False,
        owner_of: Callable[[str], str | None] | None = None,
    ) -> None:
        """on_defect: as of GuardedThread. max_message_bytes: larger requests are refused unread.

        for_scripts: as server_options has it. owner_of: as of Guard.
        """
        self._loop = asyncio.new_event_loop()
        self._running = False
        self.server = self.run(
            _make_server(server_options(max_message_bytes, for_scripts=for_scripts), Guard(owner_of=owner_of))
        )
        self._thread = GuardedThread(self._loop.run_forever, name="grpc", on_defect=on_defect)

    def start(self) -> None:
        self.run(self.server.start())
        self._thread.start()
        self._running = True

    def run(self, coroutine: Coroutine[Any, Any, _Result], timeout_seconds: float | None = None) -> _Result:
        """Runs a coroutine in the event loop, to its end. Not from the loop's own thread."""
        if self._running:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_seconds)
        return self._loop.run_until_complete(coroutine)

    def stop(self, grace_seconds: float) -> None:
        """Take no more calls; those under way are cancelled after the grace. No effect if it is not running."""
        if self._loop.is_closed():
            return
        if self._running:
            # A warning or an error for each call that it cancels, which is what it is told to do.
            logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
            self.run(self.server.stop(grace_seconds), grace_seconds + STOP_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._running = False
        self._loop.run_until_complete(_settle())
        self._loop.close()


def when_over(context: Context, callback: Callable[[], object]) -> None:
    """Call callback() in the event loop as soon as a call is over, however it ends."""
    context.add_done_callback(lambda _: callback())  # type: ignore[arg-type]  # the stubs have a class for it


def make_async_channel(address: str) -> grpc.aio.Channel:
    """A channel to host:port, for the event loop in which it is made; the caller closes it."""
    return open_async_channel(address, channel_options())


async def _make_server(options: list[tuple[str, int]], guard: Guard) -> grpc.aio.Server:
    return grpc.aio.server(options=options, interceptors=[AsyncServerGuard(guard)])


async def _settle() -> None:
    """Ends what still runs in the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    # gRPC prints a traceback where one of its own is cancelled, and not by the end of its call.
    calls = [task for task in tasks if getattr(task.get_coro(), "__name__", "") == "_schedule_rpc_coro"]
    if calls:
        await asyncio.wait(calls, timeout=SETTLE_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


# --- Messages from threads to a coroutine -----------------------------------------------------------------------------


_Message = TypeVar("_Message")


class Mailbox(Generic[_Message]):
    """Messages in the order in which they were put. To be made in the event loop that reads it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._messages: deque[_Message] = deque()
        self._closed = False

    def __len__(self) -> int:
        """How many wait to be read."""
        return len(self._messages)

    def put(self, message: _Message) -> None:
        """From any thread; never blocks. No effect once the mailbox is closed."""
        if self._closed:
            return
        self._messages.append(message)
        self._wake()

    def close(self) -> None:
        """Nothing more will come: messages() ends after what was put before. From any thread; never blocks."""
        self._closed = True
        self._wake()

    async def messages(self) -> AsyncIterator[_Message]:
        """All messages, until the mailbox is closed."""
        while True:
            closed = self._closed  # read first: what was put before the end is not lost
            while self._messages:
                yield self._messages.popleft()
            if closed:
                return
            await self._changed.wait()
            self._changed.clear()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody reads
            self._loop.call_soon_threadsafe(self._changed.set)
