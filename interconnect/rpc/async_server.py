"""A gRPC server on an event loop, for a process with many open streams: each costs a coroutine, not a thread."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import grpc

from interconnect.rpc.server import SMALL_MESSAGE_BYTES, server_options
from interconnect.threads import GuardedThread

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

STOP_SECONDS: Final = 5.0  # beyond the grace of stop: handlers that were cancelled have ended by then


class AsyncServer:
    """Owns the event loop and its thread, from `start` until `stop`. `server` gets its services and ports before."""

    def __init__(self, *, on_defect: Callable[[Exception], None], max_message_bytes: int = SMALL_MESSAGE_BYTES) -> None:
        """on_defect: as of GuardedThread. max_message_bytes: larger requests are refused unread."""
        self._loop = asyncio.new_event_loop()
        self.server = self._loop.run_until_complete(_make_server(max_message_bytes))
        self._thread = GuardedThread(self._loop.run_forever, name="grpc", on_defect=on_defect)

    def start(self) -> None:
        self._loop.run_until_complete(self.server.start())
        self._thread.start()

    def stop(self, grace_seconds: float) -> None:
        """Take no more calls; those under way are cancelled after the grace. No effect if it is not running."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            # A warning for each call that it cancels, which is what it is told to do.
            logging.getLogger("grpc._cython.cygrpc").setLevel(logging.ERROR)
            asyncio.run_coroutine_threadsafe(self.server.stop(grace_seconds), self._loop).result(
                grace_seconds + STOP_SECONDS
            )
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.run_until_complete(_settle())
        self._loop.close()


def when_over(context: Context, callback: Callable[[], object]) -> None:
    """Call callback() in the event loop as soon as a call is over, however it ends."""
    context.add_done_callback(lambda _: callback())  # type: ignore[arg-type]  # the stubs have a class for it


async def _make_server(max_message_bytes: int) -> grpc.aio.Server:
    return grpc.aio.server(options=server_options(max_message_bytes))


async def _settle() -> None:
    """Ends what still runs in the loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
