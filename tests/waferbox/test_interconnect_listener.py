import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from link_pairs import LANES, listening

from waferbox.links.dialling import dial
from waferbox.links.frame import Frame, FrameKind
from waferbox.links.grpc_lane import METHOD
from waferbox.links.handshake import acceptance
from waferbox.links.link import Link, LinkLost
from waferbox.links.listener import LinkListener
from waferbox.links.socket_names import host_id
from waferbox.rpc.address import bind
from waferbox.rpc.server import make_server
from wsc.v1 import node_pb2


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    with listening() as listener:
        yield listener


def call(
    endpoint: node_pb2.LinkEndpoint, token: str, lane: "node_pb2.Lane.ValueType", deadline_seconds: float = 5.0
) -> Link:
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

    dialled: list[Link] = []
    thread = threading.Thread(target=lambda: dialled.append(call(listener.endpoint(), "secret", lane)))
    thread.start()
    thread.join(0.2)
    assert not dialled
    link = listener.expect("secret", "here").wait(5)
    thread.join()
    link.close()
    dialled[0].close()


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


@contextlib.contextmanager
def squatted(answer: Callable[[bytes], bytes], user: int | None = None) -> Iterator[node_pb2.LinkEndpoint]:
    """An endpoint whose name another process has taken, which answers a hello so; as another user of the host."""
    name = f"waferbox-{secrets.token_hex(8)}"
    ready, heard = socket.socketpair()
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            if user is not None:
                os.setuid(user)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
                squatter.bind(f"\0{name}")
                squatter.listen()
                ready.send(b"!")
                connection, _ = squatter.accept()
                hello = connection.recv(4096)
                ready.send(hello or b"nothing")
                connection.send(answer(hello))
        os._exit(0)
    ready.close()
    heard.settimeout(5)
    assert heard.recv(1) == b"!"
    with heard:
        yield node_pb2.LinkEndpoint(address="127.0.0.1:1", host=host_id(), socket=name)
        assert b"secret" not in heard.recv(4096)
    os.waitpid(process, 0)


@pytest.mark.parametrize(
    "answer",
    [
        lambda hello: Frame(FrameKind.HELLO).header(),
        lambda hello: hello,
        lambda hello: acceptance("another secret"),
    ],
    ids=["says that it takes the link", "says what it heard", "knows another token"],
)
def test_who_has_taken_a_name_does_not_pass_for_the_peer(answer: Callable[[bytes], bytes]) -> None:
    with (
        squatted(answer) as endpoint,
        pytest.raises(LinkLost, match="does not have the link's token"),
    ):
        call(endpoint, "secret", node_pb2.LANE_SHARED_MEMORY)


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can be another user")
def test_another_user_who_has_taken_a_name_is_told_nothing() -> None:
    with (
        squatted(lambda hello: Frame(FrameKind.HELLO).header(), user=65534) as endpoint,
        pytest.raises(LinkLost, match="a process of another user listens in its place"),
    ):
        call(endpoint, "secret", node_pb2.LANE_SHARED_MEMORY)


def test_who_listens_in_place_of_a_grpc_peer_does_not_pass_for_it() -> None:
    server = make_server()

    def take(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield Frame(FrameKind.HELLO).header()

    service, method = METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(take)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    address = bind(server, "127.0.0.1:0")
    server.start()
    with pytest.raises(LinkLost):
        call(node_pb2.LinkEndpoint(address=address, host="another"), "secret", node_pb2.LANE_GRPC)
    server.stop(0).wait()


def test_a_caller_who_only_knows_what_a_listener_says_is_not_taken(listener: LinkListener) -> None:
    pending = listener.expect("secret", "here")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.connect(f"\0{listener.endpoint().socket}")
        caller.send(acceptance("secret"))
        with pytest.raises(LinkLost):
            pending.wait(0.2)
