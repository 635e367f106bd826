"""Methods of an event loop at a server with threads, calls of a loop by a channel with threads, and what blocks."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest

from waferbox.host.threads import SerialThread
from waferbox.rpc.loop_channel import LoopChannel
from waferbox.rpc.loop_method import CallContext, LoopMethod
from waferbox.rpc.loop_thread import LoopThread

PATH = "/test.Service/Method"
DEADLINE = 20.0

Method = Callable[[AsyncIterator[bytes], CallContext], AsyncIterator[bytes]]


class Service:
    """A server with one method, which an event loop serves, and another loop that calls it."""

    def __init__(self, method: Method) -> None:
        self.loop = LoopThread(name="serves", on_defect=lambda error: pytest.fail(str(error)))
        self.callers = LoopThread(name="calls", on_defect=lambda error: pytest.fail(str(error)))
        for loop in (self.loop, self.callers):
            loop.start()
        self.server = grpc.server(ThreadPoolExecutor(8))
        handler = grpc.stream_stream_rpc_method_handler(LoopMethod(method, self.loop))
        _, service, name = PATH.split("/")
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.channel = LoopChannel(grpc.insecure_channel(f"127.0.0.1:{port}"))
        self.call = self.channel.stream_stream(PATH)

    def run(self, coroutine: Any) -> Any:
        return self.callers.run(coroutine, DEADLINE)

    def close(self) -> None:
        self.run(self.channel.close())
        self.callers.stop()
        self.server.stop(None).wait(DEADLINE)
        self.loop.stop()


@pytest.fixture
def serve() -> Iterator[Callable[[Method], Service]]:
    services: list[Service] = []

    def make(method: Method) -> Service:
        services.append(Service(method))
        return services[-1]

    yield make
    for service in services:
        service.close()


async def requests(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def double(received: AsyncIterator[bytes], context: CallContext) -> AsyncIterator[bytes]:
    async for message in received:
        yield 2 * message


def test_messages_pass_in_both_directions(serve: Callable[[Method], Service]) -> None:
    service = serve(double)

    async def call() -> list[bytes]:
        return [response async for response in service.call(requests(b"a", b"b"))]

    assert service.run(call()) == [b"aa", b"bb"]


def test_an_aborted_call_has_its_code_and_reason(serve: Callable[[Method], Service]) -> None:
    async def refuse(received: AsyncIterator[bytes], context: CallContext) -> AsyncIterator[bytes]:
        yield await anext(received)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")

    service = serve(refuse)

    async def call() -> None:
        responses = aiter(service.call(requests(b"a")))
        assert await anext(responses) == b"a"
        with pytest.raises(grpc.RpcError) as caught:
            await anext(responses)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.PERMISSION_DENIED, "no")

    service.run(call())


def test_the_task_of_a_method_ends_with_its_call(serve: Callable[[Method], Service]) -> None:
    ended = threading.Event()

    async def wait(received: AsyncIterator[bytes], context: CallContext) -> AsyncIterator[bytes]:
        try:
            yield b"begun"
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    service = serve(wait)

    async def call_and_leave() -> None:
        async def read() -> None:
            async for response in service.call(requests()):
                begun.set_result(response)

        begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(read())
        assert await begun == b"begun"
        reading.cancel()
        await asyncio.wait([reading])

    service.run(call_and_leave())
    assert ended.wait(DEADLINE)


def test_a_defect_in_a_method_ends_the_call(serve: Callable[[Method], Service]) -> None:
    async def fail(received: AsyncIterator[bytes], context: CallContext) -> AsyncIterator[bytes]:
        yield await anext(received)
        raise ZeroDivisionError

    service = serve(fail)

    async def call() -> None:
        with pytest.raises(grpc.RpcError) as caught:
            [response async for response in service.call(requests(b"a"))]
        assert caught.value.code() == grpc.StatusCode.UNKNOWN

    service.run(call())


def fork_with_open_calls() -> None:
    service = Service(double)

    async def call() -> bytes:
        response: bytes = await anext(aiter(service.call(requests(b"a"))))
        return response

    for _ in range(20):
        assert service.run(call()) == b"aa"
        if not (pid := os.fork()):
            os._exit(0)
        assert not os.waitpid(pid, 0)[1]
    service.close()


def test_a_process_with_open_calls_may_be_forked() -> None:
    # In a process of its own, as other tests of this one leave loops of grpc.aio, with which none may be forked.
    code = f"import {__name__}; {__name__}.fork_with_open_calls()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=3 * DEADLINE)


def test_a_serial_thread_calls_one_function_after_the_other() -> None:
    async def run() -> None:
        thread = SerialThread("serial")
        names: list[str] = []
        calls = [thread.run(partial(names.append, f"{number}")) for number in range(3)]
        await asyncio.gather(*calls)
        assert names == ["0", "1", "2"]
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
        thread.close()

    asyncio.run(run())


def test_a_function_that_has_begun_outlives_its_caller() -> None:
    async def run() -> None:
        thread = SerialThread("serial")
        begun, released, done = threading.Event(), threading.Event(), threading.Event()

        def block() -> None:
            begun.set()
            assert released.wait(DEADLINE)
            done.set()

        waiting = asyncio.create_task(thread.run(block))
        assert await asyncio.to_thread(begun.wait, DEADLINE)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        released.set()
        assert await asyncio.to_thread(done.wait, DEADLINE)
        thread.close()

    asyncio.run(run())
