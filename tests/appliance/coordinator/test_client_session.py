"""A coordinator distinguishes the end of its client from the death of the ingress between them."""

import asyncio
import socket
from dataclasses import replace

import pytest

from appliance.coordinator.process_host import ProcessHost
from appliance.coordinator.session import ClientSession
from waferbox import deadlines


def session_behind(port: socket.socket) -> ClientSession:
    address = f"127.0.0.1:{port.getsockname()[1]}"
    return ClientSession(lambda: None, 60.0, lambda: ProcessHost.is_listening(address))


@pytest.fixture
def port() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_an_ingress_that_dies_takes_connections_for_a_moment(
    port: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = deadlines.COORDINATION.ingress_dying
    # For a busy machine.
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, ingress_dying=dying * 4))

    async def run() -> None:
        session = session_behind(port)
        ending = asyncio.create_task(session.end(is_finished=False))
        assert not (await asyncio.wait([ending], timeout=dying / 5))[0]
        port.close()  # the last of what the dying process had
        assert not (await asyncio.wait([ending], timeout=dying * 6))[0]  # this process is about to be ended
        session.close()
        await asyncio.wait_for(ending, 10.0)

    asyncio.run(run())


def test_the_end_of_a_client_is_one_where_the_ingress_lives(port: socket.socket) -> None:
    async def run() -> float:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        await asyncio.wait_for(session_behind(port).end(is_finished=False), 10.0)
        return loop.time() - begin

    with port:
        assert asyncio.run(run()) >= deadlines.COORDINATION.ingress_dying


def test_a_client_that_has_finished_is_not_waited_for(port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, ingress_dying=60.0))

    async def run() -> None:
        session = session_behind(port)
        port.close()
        await asyncio.wait_for(session.end(is_finished=True), 10.0)

    asyncio.run(run())
