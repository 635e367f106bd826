"""A gRPC method of an event loop at a server with threads: one port has the methods of both."""

import queue
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Generic, NoReturn, TypeAlias, TypeVar

import grpc

from waferbox.host.threads import SerialThread
from waferbox.rpc.loop_thread import LoopThread
from waferbox.security.guard import Metadata

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class CallAborted(Exception):
    """Raised by CallContext.abort."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class CallContext:
    """The context of a call in the event loop: what such a method uses of a grpc.aio.ServicerContext."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise CallAborted(code, details)


Method: TypeAlias = Callable[[AsyncIterator[_Request], CallContext], AsyncIterator[_Response]]


class LoopMethod(Generic[_Request, _Response]):
    """A stream-stream method of a server with threads, whose calls an asynchronous generator serves in an event loop.

    When a call is over, however it ends, the task that runs its generator is cancelled.
    """

    def __init__(self, method: "Method[_Request, _Response]", loop: LoopThread) -> None:
        self._method = method
        self._loop = loop

    def __call__(self, requests: Iterator[_Request], context: grpc.ServicerContext) -> Iterator[_Response]:
        responses: queue.SimpleQueue[_Response | None] = queue.SimpleQueue()  # None: there are no more
        serving = self._loop.submit(self._serve(requests, CallContext(context.invocation_metadata() or ()), responses))
        serving.add_done_callback(lambda _: responses.put(None))

        def cancel() -> None:
            serving.cancel()

        if not context.add_callback(cancel):
            cancel()
        yield from iter(responses.get, None)
        if serving.cancelled():
            return
        try:
            serving.result()
        except CallAborted as error:
            context.abort(error.code, error.details)

    async def _serve(
        self, requests: Iterator[_Request], context: CallContext, responses: "queue.SimpleQueue[_Response | None]"
    ) -> None:
        reader = SerialThread("requests")
        try:
            async with aclosing(self._method(_read(requests, reader), context)) as serving:  # type: ignore[type-var]
                async for response in serving:
                    responses.put(response)
        finally:
            reader.close()


async def _read(requests: Iterator[_Request], reader: SerialThread) -> AsyncIterator[_Request]:
    """All requests of a call, until the client sends no more, or the call is over."""

    def read() -> _Request | None:
        try:
            return next(requests, None)
        except grpc.RpcError:
            return None

    while (request := await reader.run(read)) is not None:
        yield request
