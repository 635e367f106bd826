"""The page's server and clients that do not finish what they say, or say too much; with real sockets."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest
from page_rig import FakeSource

from appliance.page import app
from appliance.page.server import MAX_CONNECTIONS, PageServer
from waferbox.rpc.address import split_address

pytestmark = pytest.mark.services

HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
NUM_HALF_OPEN = 200  # more than the page takes


@pytest.fixture
def server() -> Iterator[PageServer]:
    one = PageServer("127.0.0.1:0")
    one.start(FakeSource())
    yield one
    one.close()


@pytest.fixture
def connect(server: PageServer) -> Iterator[Callable[..., socket.socket]]:
    made: list[socket.socket] = []

    def make(said: bytes) -> socket.socket:
        made.append(socket.create_connection(split_address(server.address), timeout=20))
        made[-1].sendall(said)
        return made[-1]

    yield make
    for one in made:
        one.close()


def heard(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    try:
        while more := connection.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass
    return data


def status(connection: socket.socket) -> int:
    return int(heard(connection).split(b" ", 2)[1])


def test_the_page_answers_while_half_requests_are_held(connect: Callable[..., socket.socket]) -> None:
    assert NUM_HALF_OPEN > MAX_CONNECTIONS
    for _ in range(NUM_HALF_OPEN):
        connect(HALF)
    assert status(connect(HALF + b"Connection: close\r\n\r\n")) == 200


def test_half_a_request_has_a_deadline(connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HEAD_SECONDS", 0.2)
    silent, slow, second = connect(b""), connect(HALF), connect(HALF + b"\r\n")
    assert status(silent) == 408
    assert status(slow) == 408
    while b"</html>" not in second.recv(1 << 16):
        pass
    second.sendall(HALF)
    assert status(second) == 408


def test_a_stream_of_events_is_not_cut_off(
    connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "HEAD_SECONDS", 0.1)
    stream = connect(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    first = stream.recv(1 << 16)
    assert first.startswith(b"HTTP/1.1 200")
    # A head that is cut off meanwhile proves that the deadline has passed.
    assert status(connect(HALF)) == 408
    stream.settimeout(0.1)
    try:
        while more := stream.recv(1 << 16):
            assert b"408" not in more
        pytest.fail("the stream has ended")
    except TimeoutError:
        pass


@pytest.mark.parametrize(
    ("target", "headers", "expected"),
    [
        ("/jobs/" + "j" * 60_000, "", 414),
        ("/jobs/" + "j" * 200_000, "", 414),
        ("/?" + "q" * app.MAX_ADDRESS_BYTES, "", 414),
        ("/", f"X-Long: {'x' * 200_000}\r\n", 431),
        ("/jobs/" + "j" * 1000, "", 404),
    ],
)
def test_what_is_too_long_is_said(
    connect: Callable[..., socket.socket], target: str, headers: str, expected: int
) -> None:
    request = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{headers}\r\n"
    connection = connect(b"")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may be refused before all of it is sent
        connection.sendall(request.encode())
    assert status(connection) == expected


def test_nonsense_is_refused(connect: Callable[..., socket.socket]) -> None:
    assert status(connect(b"\x16\x03\x01 is no HTTP\r\n\r\n")) == 400
