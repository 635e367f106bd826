"""A server in an event loop that ends while calls come."""

import threading

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from waferbox.rpc.address import bind
from waferbox.rpc.async_server import AsyncServer

NUM_SERVERS, NUM_CALLERS = 40, 6  # one end in forty printed a traceback
SECONDS = 5.0


def call(stub: health_pb2_grpc.HealthStub, over: threading.Event, begun: threading.Semaphore) -> None:
    while not over.is_set():
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError:
            return
        begun.release()


@pytest.mark.services
def test_nothing_is_printed_of_calls_that_end_with_their_server(capfd: pytest.CaptureFixture[str]) -> None:
    defects: list[Exception] = []
    for _ in range(NUM_SERVERS):
        server = AsyncServer(on_defect=defects.append)
        address = bind(server.server, "127.0.0.1:0")
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server.server)  # type: ignore[attr-defined]  # not in the stubs
        server.start()
        over, begun = threading.Event(), threading.Semaphore(0)
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            callers = [threading.Thread(target=call, args=(stub, over, begun)) for _ in range(NUM_CALLERS)]
            for caller in callers:
                caller.start()
            assert begun.acquire(timeout=SECONDS)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            server.stop(0)
            over.set()
            for caller in callers:
                caller.join()
            watch.cancel()
    assert not defects
    assert "Traceback" not in capfd.readouterr().err
