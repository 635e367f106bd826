"""A node at management: registration, heartbeats, another management, a refusal, an address that cannot be had."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
from role_rig import FakeManagement, until

from swarmx.swarmx_program import SwarmXJob
from waferbox import deadlines, roles
from waferbox.rpc.address import bind
from waferbox.rpc.async_server import make_async_channel
from waferbox.rpc.loop_thread import LoopThread
from waferbox.rpc.server import make_server
from waferbox.runtime.node import Node, NodeSettings, parse_arguments
from waferbox.runtime.registration import Registration
from wsc.v1 import management_pb2, node_pb2


def hello() -> management_pb2.RegisterRequest:
    return management_pb2.RegisterRequest(role=node_pb2.ROLE_SWARMX, address="127.0.0.1:1")


@contextmanager
def registered(
    management: FakeManagement,
    on_refusal: Callable[[str], None] = pytest.fail,
    open_channel: Callable[[str], grpc.aio.Channel] = make_async_channel,
) -> Iterator[None]:
    """Keeps a node registered within a with statement."""
    loop = LoopThread(name="control", on_defect=lambda error: pytest.fail(str(error)))
    registration = Registration(management.address, hello, on_refusal, open_channel)

    async def start() -> None:
        registration.start()

    loop.start()
    loop.run(start())
    try:
        yield
    finally:
        loop.run(registration.close())
        loop.stop()


def test_lease_is_kept_alive_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, first_heartbeat=0.1))
    management = FakeManagement()
    with registered(management):
        management.wait_for(node_pb2.ROLE_SWARMX)
        until(lambda: management.heartbeats >= 3)
    until(lambda: management.left == 1)
    management.close()


def test_node_comes_back_when_management_does() -> None:
    first = FakeManagement()
    with registered(first):
        first.wait_for(node_pb2.ROLE_SWARMX)
        first.close()
        second = FakeManagement(first.address)
        second.wait_for(node_pb2.ROLE_SWARMX)
    second.close()


def test_refusal_ends_the_node() -> None:
    management = FakeManagement()
    management.refusal = "versions differ"
    node = Node(roles.SWARMX, NodeSettings(management=management.address), SwarmXJob)
    node.start()
    node.wait()
    assert "versions differ" in node.refusal
    node.close()
    management.close()


def test_a_server_that_is_no_management_service_ends_the_node() -> None:
    server = make_server()
    address = bind(server, "127.0.0.1:0")
    server.start()
    node = Node(roles.SWARMX, NodeSettings(management=address), SwarmXJob)
    node.start()
    node.wait()
    assert node.refusal == f"what listens at {address} is no management service: check the port"
    node.close()
    server.stop(None).wait(5)


def test_port_that_is_taken_is_an_error() -> None:
    management = FakeManagement()
    with pytest.raises(OSError, match="cannot listen"):
        Node(
            roles.SWARMX,
            NodeSettings(management=management.address, listen=management.address),
            SwarmXJob,
        )
    management.close()


def test_closing_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    node = Node(roles.SWARMX, NodeSettings(management="127.0.0.1:1"), SwarmXJob)
    node.start()
    node.end()
    node.wait()
    node.close()
    # gRPC ends its own threads, and those of servers that tests before this one stopped, in the background.
    until(lambda: not [thread for thread in threading.enumerate() if thread not in before and not thread.daemon])


def test_arguments() -> None:
    settings = parse_arguments(roles.WAFER, ["--management", "a:1", "--threads", "2"])
    assert settings == NodeSettings(management="a:1", listen="127.0.0.1:0", threads=2)
    with pytest.raises(SystemExit):
        parse_arguments(roles.WAFER, [])
    with pytest.raises(SystemExit):
        parse_arguments(roles.WAFER, ["--management", "a:1", "--threads", "0"])


@pytest.mark.defects
def test_a_defect_in_the_registration_ends_the_node(caplog: pytest.LogCaptureFixture) -> None:
    management = FakeManagement()
    ended = threading.Event()
    reasons: list[str] = []

    def end(reason: str) -> None:
        reasons.append(reason)
        ended.set()

    def broken_channel(address: str) -> grpc.aio.Channel:
        raise RuntimeError("a defect")

    with registered(management, end, broken_channel):
        assert ended.wait(10)
    assert reasons == ["a defect in this node's registration: RuntimeError('a defect')"]
    assert "Traceback" in caplog.text
    management.close()
