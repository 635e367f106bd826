import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from link_pairs import LANES, listening

from interconnect.links.dialling import dial
from interconnect.links.frame import Frame, FrameKind
from interconnect.links.handshake import host_id
from interconnect.links.link import LinkLost
from interconnect.links.listener import LinkListener
from wsc.v1 import node_pb2


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    with listening() as listener:
        yield listener


def call(
    endpoint: node_pb2.LinkEndpoint, token: str, lane: "node_pb2.Lane.ValueType", deadline_seconds: float = 5.0
) -> object:
    return dial(endpoint, token, name="there", own_name="here", lane=lane, deadline_seconds=deadline_seconds)


@pytest.mark.parametrize(
    ("lane", "elsewhere", "expected"),
    [
        (node_pb2.LANE_UNSPECIFIED, False, "shared memory"),
        (node_pb2.LANE_UNSPECIFIED, True, "grpc"),
        (node_pb2.LANE_SHARED_MEMORY, False, "shared memory"),
        (node_pb2.LANE_GRPC, False, "grpc"),
        (node_pb2.LANE_GRPC, True, "grpc"),
    ],
)
def test_the_lane_is_chosen(
    listener: LinkListener, lane: "node_pb2.Lane.ValueType", elsewhere: bool, expected: str
) -> None:
    endpoint = listener.endpoint()
    if elsewhere:
        endpoint.host = "another"
    pending = listener.expect("secret", "here")
    dialled = dial(endpoint, "secret", name="there", own_name="here", lane=lane, deadline_seconds=5)
    taken = pending.wait(5)
    assert (dialled.lane, taken.lane) == (expected, expected)
    assert (dialled.name, taken.name) == ("there", "here")
    dialled.close()
    taken.close()


def test_a_socket_that_is_not_there_is_no_obstacle(listener: LinkListener) -> None:
    endpoint = listener.endpoint()
    endpoint.socket = "waferbox-of-a-process-that-is-gone"
    pending = listener.expect("secret", "here")
    link = dial(endpoint, "secret", name="there", own_name="here", lane=node_pb2.LANE_UNSPECIFIED, deadline_seconds=5)
    assert link.lane == "grpc"
    pending.wait(5).close()
    link.close()


def test_shared_memory_is_refused_where_it_cannot_be(listener: LinkListener) -> None:
    endpoint = listener.endpoint()
    endpoint.host = "another"
    with pytest.raises(LinkLost, match=r"there.*on another host"):
        call(endpoint, "secret", node_pb2.LANE_SHARED_MEMORY)


@pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
def test_a_wrong_token_opens_nothing(listener: LinkListener, lane: "node_pb2.Lane.ValueType") -> None:
    pending = listener.expect("secret", "here")
    begin = time.monotonic()
    with pytest.raises(LinkLost, match="there"):
        call(listener.endpoint(), "guess", lane, 0.5)
    assert time.monotonic() - begin < 4
    with pytest.raises(LinkLost, match=r"here.*did not connect within 0 s"):
        pending.wait(0)


@pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
def test_a_token_opens_one_link(listener: LinkListener, lane: "node_pb2.Lane.ValueType") -> None:
    pending = listener.expect("secret", "here")
    link = dial(listener.endpoint(), "secret", name="there", own_name="here", lane=lane, deadline_seconds=5)
    with pytest.raises(LinkLost):
        call(listener.endpoint(), "secret", lane, 0.3)
    pending.wait(5).close()
    link.close()


@pytest.mark.parametrize("lane", LANES.values(), ids=LANES)
def test_the_peer_may_come_before_it_is_expected(listener: LinkListener, lane: "node_pb2.Lane.ValueType") -> None:
    import threading

    dialled: list[object] = []
    thread = threading.Thread(target=lambda: dialled.append(call(listener.endpoint(), "secret", lane)))
    thread.start()
    thread.join(0.2)
    assert not dialled
    link = listener.expect("secret", "here").wait(5)
    thread.join()
    link.close()
    dialled[0].close()  # type: ignore[attr-defined]


def test_a_link_that_is_not_wanted_any_more_is_closed(listener: LinkListener) -> None:
    pending = listener.expect("secret", "here")
    link = dial(
        listener.endpoint(), "secret", name="there", own_name="here", lane=node_pb2.LANE_GRPC, deadline_seconds=5
    )
    pending.close()
    deadline = time.monotonic() + 5
    while not link.ended and time.monotonic() < deadline:
        link.poll()
        time.sleep(0.01)
    assert link.ended
    link.close()


def test_nobody_at_the_address_is_said_in_time() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = node_pb2.LinkEndpoint(address=f"127.0.0.1:{taken.getsockname()[1]}", host="another")
        begin = time.monotonic()
        with pytest.raises(LinkLost, match="there"):
            call(endpoint, "secret", node_pb2.LANE_GRPC, 0.3)
        assert time.monotonic() - begin < 3
        endpoint.host, endpoint.socket = host_id(), "nobody"
        with pytest.raises(LinkLost, match="cannot be reached"):
            call(endpoint, "secret", node_pb2.LANE_SHARED_MEMORY)


def test_callers_who_talk_nonsense_are_sent_away(listener: LinkListener) -> None:
    for greeting in (
        b"hello",
        Frame(FrameKind.ACK).header(),
        Frame(FrameKind.HELLO, length=1).header(b"\xff") + b"\xff",
    ):
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.settimeout(5)
        caller.connect(f"\0{listener.endpoint().socket}")
        caller.send(greeting)
        assert caller.recv(100) == b""
        caller.close()
    pending = listener.expect("secret", "here")
    link = dial(
        listener.endpoint(),
        "secret",
        name="there",
        own_name="here",
        lane=node_pb2.LANE_SHARED_MEMORY,
        deadline_seconds=5,
    )
    pending.wait(5).close()
    link.close()


def test_a_closed_listener_lets_waiting_callers_go() -> None:
    with listening() as listener:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.settimeout(5)
        caller.connect(f"\0{listener.endpoint().socket}")
        caller.send(Frame(FrameKind.HELLO, length=1).header(b"t") + b"t")
    with contextlib.suppress(ConnectionResetError):  # where what it sent had not been read
        assert caller.recv(100) == b""
    caller.close()
