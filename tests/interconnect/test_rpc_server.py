"""What all servers do with calls, before any service sees them."""

import threading

import grpc
import pytest

from interconnect.rpc.server import make_channel, make_server

NUM_CALLS = 2500
ARRIVE_SECONDS = 2.0
DEADLINE_SECONDS = 100.0


@pytest.mark.services
def test_calls_that_come_at_once_are_all_looked_at() -> None:
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    answered = threading.Event()
    with make_channel(f"127.0.0.1:{port}", "no token") as channel:
        call = channel.unary_unary("/wsc.v1.Management/Nothing")
        with server._state.lock:  # the thread that looks at calls waits for it
            futures = [call.future(b"", timeout=DEADLINE_SECONDS) for _ in range(NUM_CALLS)]
            for future in futures:
                future.add_done_callback(lambda _: answered.set())
            assert not answered.wait(ARRIVE_SECONDS), "gRPC has refused calls that nobody has looked at"
        codes = {future.exception(DEADLINE_SECONDS).code() for future in futures}
    server.stop(None).wait()
    assert codes == {grpc.StatusCode.UNIMPLEMENTED}
