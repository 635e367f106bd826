"""What all servers do with calls, before any service sees them, and what callers are told of a server that stops."""

import queue
import socket
import struct
import threading
from collections.abc import Iterator

import grpc
import pytest

from waferbox.rpc.server import make_channel, make_server

NUM_CALLS = 2500
ARRIVE_SECONDS = 2.0
DEADLINE_SECONDS = 100.0
TOLD_SECONDS = 10.0

HEADER_BYTES = 9  # of a frame of HTTP/2, of these kinds
HEADERS, SETTINGS, GOAWAY = 1, 4, 7


def code_of(future: "grpc.Future[object]") -> grpc.StatusCode:
    error = future.exception(DEADLINE_SECONDS)  # type: ignore[call-arg]  # the stubs have no timeout
    assert isinstance(error, grpc.RpcError)
    return error.code()


@pytest.mark.services
def test_calls_that_come_at_once_are_all_looked_at() -> None:
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    answered = threading.Event()
    with make_channel(f"127.0.0.1:{port}", "no token") as channel:
        call = channel.unary_unary("/wsc.v1.Management/Nothing", None, None)
        with server._state.lock:  # type: ignore[attr-defined]  # gRPC's own; who looks at calls waits for it
            futures = [call.future(b"", timeout=DEADLINE_SECONDS) for _ in range(NUM_CALLS)]
            for future in futures:
                future.add_done_callback(lambda _: answered.set())
            assert not answered.wait(ARRIVE_SECONDS), "gRPC has refused calls that nobody has looked at"
        codes = {code_of(future) for future in futures}
    server.stop(None).wait()
    assert codes == {grpc.StatusCode.UNIMPLEMENTED}


@pytest.mark.services
def test_who_reads_a_stream_is_told_that_a_server_stopped_before_it_saw_the_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=refuse_unseen, args=(listener,))
        server.start()
        with make_channel(f"127.0.0.1:{listener.getsockname()[1]}", "no token") as channel:
            stream = channel.unary_stream("/wsc.v1.Coordinator/Session", None, None)(b"")
            raised: queue.SimpleQueue[grpc.RpcError] = queue.SimpleQueue()
            reader = threading.Thread(target=read_to_the_end, args=(stream, raised))
            reader.start()
            assert raised.get(timeout=TOLD_SECONDS).code() == grpc.StatusCode.UNAVAILABLE
    server.join()
    reader.join()


def refuse_unseen(listener: socket.socket) -> None:
    """What a server does that stops while a call is on its way: it takes no connections, then says that it saw none."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as received:
        received.read(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        connection.sendall(http2_frame(SETTINGS))
        kind = SETTINGS
        while kind != HEADERS:
            header = received.read(HEADER_BYTES)
            received.read(int.from_bytes(header[:3], "big"))
            kind = header[3]
        listener.close()
        last_stream, error = 0, 0
        connection.sendall(http2_frame(GOAWAY, struct.pack(">II", last_stream, error)))


def http2_frame(kind: int, payload: bytes = b"") -> bytes:
    flags, stream = 0, 0
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def read_to_the_end(stream: Iterator[bytes], raised: "queue.SimpleQueue[grpc.RpcError]") -> None:
    try:
        for _ in stream:
            pass
    except grpc.RpcError as error:
        raised.put(error)
