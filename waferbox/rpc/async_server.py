"""gRPC servers and channels on an event loop, for processes with many open streams.

An open stream costs a coroutine here, and a thread in a server of `waferbox.rpc.server`.
"""

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias, TypeVar

import grpc

from waferbox.host.event_loop import SteadyClock, SteadyEventLoop
from waferbox.host.threads import GuardedThread
from waferbox.rpc.server import SMALL_MESSAGE_BYTES, channel_options, server_options
from waferbox.security.guard import AsyncServerGuard, Guard
from waferbox.security.tls import open_async_channel

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_Result = TypeVar("_Result")

STOP_SECONDS: Final = 5.0  # beyond the grace of `stop`, for cancelled handlers to end
SETTLE_SECONDS: Final = 1.0  # for calls that have ended with the server to be over


class AsyncServer:
    """A gRPC server with an event loop and its thread. Services and ports are added to `server` before `start`.

    Used by one thread, beside that of the loop.
    """

    def __init__(
        self,
        *,
        on_defect: Callable[[Exception], None],
        max_message_bytes: int = SMALL_MESSAGE_BYTES,
        for_scripts: bool = False,
        owner_of: Callable[[str], str | None] | None = None,
        clock: SteadyClock | None = None,
    ) -> None:
        """Makes the server and its event loop.

        Args:
            on_defect: as of GuardedThread.
            max_message_bytes: larger requests are refused unread.
            for_scripts: as of server_options.
            owner_of: as of Guard.
            clock: of the event loop, for services that measure time.
        """
        self._loop = SteadyEventLoop(clock or SteadyClock())
        self._running = False

        async def make() -> grpc.aio.Server:
            guard = Guard(owner_of=owner_of)
            return make_async_server(guard, max_message_bytes=max_message_bytes, for_scripts=for_scripts)

        self.server = self.run(make())
        self._thread = GuardedThread(self._loop.run_forever, name="grpc", on_defect=on_defect)

    def start(self) -> None:
        self.run(self.server.start())
        self._thread.start()
        self._running = True

    def run(self, coroutine: Coroutine[Any, Any, _Result], timeout_seconds: float | None = None) -> _Result:
        """Runs a coroutine in the event loop, and returns its result. Not to be called in the loop's own thread."""
        if self._running:
            return self.submit(coroutine).result(timeout_seconds)
        return self._loop.run_until_complete(coroutine)

    def submit(self, coroutine: Coroutine[Any, Any, _Result]) -> "concurrent.futures.Future[_Result]":
        """Begins a coroutine in the event loop, after `start`, from any thread. Returns the future of its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self, grace_seconds: float) -> None:
        """Takes no more calls, and cancels those under way after the grace. Further calls have no effect."""
        if self._loop.is_closed():
            return
        if self._running:
            # gRPC logs a warning or an error for each call that it cancels here on purpose.
            logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
            self.run(self.server.stop(grace_seconds), grace_seconds + STOP_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._running = False
        self._loop.run_until_complete(_settle())
        self._loop.close()


def make_async_server(guard: Guard, *, max_message_bytes: int, for_scripts: bool) -> grpc.aio.Server:
    """A server for the running event loop; the caller adds ports and services, starts it and stops it.

    Args:
        guard: of the server.
        max_message_bytes: larger requests are refused unread.
        for_scripts: as of server_options.
    """
    options = server_options(max_message_bytes, for_scripts=for_scripts)
    return grpc.aio.server(options=options, interceptors=[AsyncServerGuard(guard)])


def when_over(context: Context, callback: Callable[[], object]) -> None:
    """Calls `callback` in the event loop once a call is over, however it ends."""
    context.add_done_callback(lambda _: callback())  # type: ignore[arg-type]  # the stubs have a class for it


def make_async_channel(address: str) -> grpc.aio.Channel:
    """A channel to host:port, for the event loop in which it is made; the caller closes it."""
    return open_async_channel(address, channel_options())


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
