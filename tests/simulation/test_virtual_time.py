"""The simulator itself: its clock, its processes and its network."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from network import Channel, Context, Network, Server
from virtual_time import Hang, Process, World

from wsc.v1 import management_pb2, management_pb2_grpc


def test_time_passes_at_once_and_in_order() -> None:
    world = World(0)
    process = Process(world, "one")
    seen: list[tuple[float, str]] = []

    async def main() -> int:
        async def wait(seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((world.now, f"{seconds:g} s"))

        await asyncio.gather(wait(3600.0), wait(1.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.get_running_loop().create_future()
        assert await asyncio.to_thread(lambda: 7) == 7
        return 3

    process.start(main)
    assert world.run(10_000.0, lambda: not process.is_alive)
    assert process.status == 3
    assert seen == [(1.0, "1 s"), (3600.0, "3600 s")]
    world.close()


def test_a_wait_that_nothing_ends_is_a_hang() -> None:
    world = World(0)

    async def main() -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    Process(world, "one").start(main)
    with pytest.raises(Hang):
        world.run(10.0, lambda: False)
    world.close()


def test_a_killed_process_does_nothing_more_and_a_stalled_one_later() -> None:
    world = World(0)
    beats: dict[str, list[float]] = {}

    def beating(name: str) -> Process:
        async def main() -> int:
            try:
                while True:
                    beats.setdefault(name, []).append(world.now)
                    await asyncio.sleep(1.0)
            finally:
                beats["end"] = []

        process = Process(world, name)
        process.start(main)
        return process

    killed, stalled = beating("killed"), beating("stalled")
    world.after(2.5, killed.kill)
    world.after(1.5, stalled.stall, 10.0)
    world.run(14.0)
    assert beats == {"killed": [0.0, 1.0, 2.0], "stalled": [0.0, 1.0, 12.0, 13.0, 14.0]}
    world.close()


def test_what_arrives_at_a_process_that_is_stalled_twice_stays_in_order() -> None:
    world = World(0)
    process = Process(world, "stalled")
    arrived: list[int] = []
    world.after(1.0, process.stall, 5.0)
    world.after(2.0, lambda: process.loop.call_soon(arrived.append, 1))
    world.after(3.0, process.stall, 5.0)
    world.after(4.0, lambda: process.loop.call_soon(arrived.append, 2))
    world.after(10.0, lambda: None)
    world.run(9.0)
    assert arrived == [1, 2]
    world.close()


class Echo(management_pb2_grpc.ManagementServicer):
    """Answers with what it is asked."""

    def __init__(self) -> None:
        self.over = 0

    async def Register(  # type: ignore[override]  # another context
        self, request_iterator: AsyncIterator[management_pb2.RegisterRequest], context: Context
    ) -> AsyncIterator[management_pb2.RegisterResponse]:
        def over(context: Context) -> None:
            self.over += 1

        context.add_done_callback(over)
        async for request in request_iterator:
            if not request.address:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an empty address")
            yield management_pb2.RegisterResponse(node_id=request.address)


async def echoed(channel: Channel, *texts: str, waits: float = 0.0) -> list[str]:
    stub = management_pb2_grpc.ManagementStub(channel)  # type: ignore[call-overload]

    async def requests() -> AsyncIterator[management_pb2.RegisterRequest]:
        for text in texts:
            yield management_pb2.RegisterRequest(address=text)
        await asyncio.sleep(waits)

    return [response.node_id async for response in stub.Register(requests())]


@pytest.mark.parametrize("seed", range(20))
def test_calls_keep_their_order_and_break_with_their_server(seed: int) -> None:
    world = World(seed)
    network, echo = Network(world), Echo()  # type: ignore[abstract]
    server, client = Process(world, "server"), Process(world, "client")
    management_pb2_grpc.add_ManagementServicer_to_server(echo, Server(network, server, "here:1"))  # type: ignore[arg-type]

    async def main() -> int:
        channel = Channel(network, client, "here:1")
        assert await echoed(channel, *map(str, range(1, 50))) == [str(number) for number in range(1, 50)]
        assert echo.over == 1
        with pytest.raises(grpc.aio.AioRpcError, match="an empty address"):
            await echoed(channel, "")
        with pytest.raises(grpc.aio.AioRpcError, match="the connection broke"):
            await echoed(channel, "a", waits=1000.0)
        with pytest.raises(grpc.aio.AioRpcError, match="failed to connect"):
            await echoed(Channel(network, client, "here:1"), "a")
        return 0

    client.start(main)
    world.after(100.0, server.kill)
    assert world.run(500.0, lambda: not client.is_alive)
    assert not client.world.defects
    world.close()
