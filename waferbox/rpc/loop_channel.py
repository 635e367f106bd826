"""A gRPC channel with threads for an event loop, in processes whose server has threads, or that may be forked.

A process that has used grpc.aio and forks, as scripts do with the workers of a DataLoader, has children that crash
(grpcio 1.76 to 1.85).
"""

import asyncio
import queue
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from waferbox.host.event_loop import Mailbox, from_any_thread
from waferbox.host.threads import GuardedThread


class LoopChannel:
    """A channel whose calls are awaited, or iterated over, as those of a grpc.aio.Channel. Used in one event loop.

    Failed calls raise a grpc.RpcError that is a grpc.Call.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        """channel: of this object, which closes it."""
        self._channel = channel

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Awaitable[Any]]:
        method = self._channel.unary_unary(*arguments, **options)

        async def call(request: Any, **settings: Any) -> Any:
            future = method.future(request, **settings)
            done = asyncio.Event()
            wake = from_any_thread(done.set)
            future.add_done_callback(lambda _: wake())
            try:
                await done.wait()
            except asyncio.CancelledError:
                future.cancel()  # type: ignore[no-untyped-call]
                raise
            return future.result()

        return call

    def unary_stream(self, *arguments: Any, **options: Any) -> "Callable[..., StreamCall]":
        method = self._channel.unary_stream(*arguments, **options)
        return lambda request, **settings: StreamCall(method(request, **settings))

    def stream_stream(self, *arguments: Any, **options: Any) -> "Callable[..., StreamCall]":
        method = self._channel.stream_stream(*arguments, **options)

        def call(requests: AsyncIterable[Any], **settings: Any) -> StreamCall:
            sent: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None: there are no more
            return StreamCall(method(iter(sent.get, None), **settings), asyncio.create_task(_pass(requests, sent)))

        return call

    async def close(self, grace: float | None = None) -> None:
        """Ends all calls. grace: as of grpc.aio.Channel; there is none."""
        self._channel.close()


async def _pass(requests: AsyncIterable[Any], sent: "queue.SimpleQueue[Any]") -> None:
    try:
        async for request in requests:
            sent.put(request)
    finally:
        sent.put(None)


class StreamCall:
    """A call whose responses a thread reads, and which ends with the iteration over them."""

    def __init__(self, call: Any, sending: "asyncio.Task[None] | None" = None) -> None:
        """call: of a channel with threads. sending: passes the requests on."""
        self._call = call
        self._sending = sending
        self._responses: Mailbox[Any] = Mailbox()
        self._error: Exception | None = None
        GuardedThread(self._read, name="responses", on_defect=self._fail).start()

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yields the responses, once. Raises the error of the call after the last."""
        try:
            async for response in self._responses.messages():
                yield response
            if self._error is not None:
                raise self._error
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the call, if it has not ended."""
        self._call.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._responses.put(response)
        except grpc.RpcError as error:
            self._error = error
        self._responses.close()

    def _fail(self, defect: Exception) -> None:
        self._error = defect
        self._responses.close()
