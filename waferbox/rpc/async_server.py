"""gRPC servers and channels on an event loop, for processes with many open streams.

An open stream costs a coroutine here, and a thread in a server of `waferbox.rpc.server`.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import grpc

from waferbox.host.event_loop import SteadyClock
from waferbox.rpc.loop_thread import LoopThread
from waferbox.rpc.server import SMALL_MESSAGE_BYTES, channel_options, server_options
from waferbox.security.guard import AsyncServerGuard, Guard
from waferbox.security.tls import open_async_channel

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

STOP_SECONDS: Final = 5.0  # beyond the grace of `stop`, for cancelled handlers to end


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
            clock: as of LoopThread.
        """
        self.loop = LoopThread(name="grpc", on_defect=on_defect, clock=clock)

        async def make() -> grpc.aio.Server:
            guard = Guard(owner_of=owner_of)
            return make_async_server(guard, max_message_bytes=max_message_bytes, for_scripts=for_scripts)

        self.server = self.loop.run(make())

    def start(self) -> None:
        self.loop.run(self.server.start())
        self.loop.start()

    def stop(self, grace_seconds: float) -> None:
        """Takes no more calls, and cancels those under way after the grace. Further calls have no effect."""
        if self.loop.is_running:
            # gRPC logs a warning or an error for each call that it cancels here on purpose.
            logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
            self.loop.run(self.server.stop(grace_seconds), grace_seconds + STOP_SECONDS)
        self.loop.stop()


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
