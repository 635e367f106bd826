"""As many links to one node's server as a node may have children."""

import asyncio
import threading
from collections.abc import AsyncIterator

import grpc
import pytest
from link_pairs import listening
from tokens_shown import shown

from waferbox.host.descriptors import raise_descriptor_limit
from waferbox.links.frame import Frame, FrameKind, parse
from waferbox.links.grpc_lane import METHOD
from waferbox.links.handshake import PROOF_KEY, dialler_proof, is_accepting
from waferbox.links.hub import Hub
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.security.tokens import Kind

pytestmark = pytest.mark.cluster  # two thousand threads

NUM_LINKS = 1024
NUM_CONNECTIONS = 16
UP, DOWN = 1, 2
DEADLINE_SECONDS = 120.0


async def be_child(channel: grpc.aio.Channel, number: int, closed: asyncio.Event) -> None:
    """Says its number, hears the same, and stays."""
    ended = asyncio.Event()

    async def frames() -> AsyncIterator[bytes]:
        payload = number.to_bytes(8, "little")
        yield Frame(FrameKind.BYTES, UP, 0, 1, 0, 8, 8).header(memoryview(payload)) + payload
        await ended.wait()

    call = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)(
        frames(), metadata=((PROOF_KEY, dialler_proof(f"token-{number}")), *shown(Kind.NODE))
    )
    accepted, told = await call.read(), await call.read()
    assert isinstance(accepted, bytes)
    assert isinstance(told, bytes)
    assert is_accepting(accepted, f"token-{number}")
    frame, payload = parse(told)
    assert (frame.group, int.from_bytes(payload, "little")) == (DOWN, number)
    await closed.wait()
    ended.set()
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
        pass


async def be_children(address: str, closed: threading.Event) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(NUM_CONNECTIONS)]
    all_done = asyncio.Event()
    children = [
        asyncio.create_task(be_child(channels[number % NUM_CONNECTIONS], number, all_done))
        for number in range(NUM_LINKS)
    ]
    await asyncio.to_thread(closed.wait, DEADLINE_SECONDS)
    all_done.set()
    await asyncio.gather(*children)
    for channel in channels:
        await channel.close(None)


def test_a_node_has_a_thousand_links_at_once() -> None:
    raise_descriptor_limit()
    done = threading.Event()
    failures: list[BaseException] = []

    def run_children(address: str) -> None:
        try:
            asyncio.run(be_children(address, done))
        except BaseException as error:
            failures.append(error)
            raise

    with listening() as listener:
        hub = Hub()
        pending = [listener.expect(f"token-{number}", f"child-{number}") for number in range(NUM_LINKS)]
        children = threading.Thread(target=run_children, args=[listener.endpoint().address])
        children.start()
        try:
            links = [each.wait(DEADLINE_SECONDS) for each in pending]
            for link in links:
                hub.add(link)
            memory = SharedMemory.create(8)
            for number, link in enumerate(links):
                message = hub.receive(link, UP, 1)
                assert int.from_bytes(message.view, "little") == number
                memory.buffer[:8] = message.view
                hub.send(link, DOWN, 1, Slice(memory, 0, 8), as_bytes=True)
        finally:
            done.set()
            children.join(DEADLINE_SECONDS)
        for link in links:
            link.close()
        hub.close()
    assert not failures
