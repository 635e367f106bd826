"""Calls through the management service's gateway."""

import queue
import threading
from collections.abc import Iterator

import grpc
import pytest

from appliance.management.gateway import Gateway
from interconnect.address import bind
from interconnect.server import make_channel, make_server, through
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, node_pb2, node_pb2_grpc

SECONDS = 10.0


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers with what it was sent, and knows who left."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def Compile(self, request: coordinator_pb2.CompileRequest, context: grpc.ServicerContext):
        if not request.cirh:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no text")
        return coordinator_pb2.CompileResponse(artifact=request.cirh)

    def Session(self, request: coordinator_pb2.SessionRequest, context: grpc.ServicerContext):
        context.add_callback(self.left.set)
        yield coordinator_pb2.SessionResponse(failure=node_pb2.Failure(message=request.token))
        self.left.wait(SECONDS)

    def Execute(self, request_iterator, context: grpc.ServicerContext):
        for request in request_iterator:
            yield coordinator_pb2.ExecuteResponse(
                checkpoint=coordinator_pb2.CheckpointReady(step=request.consumed.step)
            )


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def address(coordinator: Coordinator) -> Iterator[str]:
    """The coordinator's, through a gateway that lets nobody reach anything else."""
    behind, gateway = make_server(), make_server()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(coordinator, behind)
    own = bind(behind, "127.0.0.1:0")
    Gateway(lambda address: address == own).add_to_server(gateway)
    management = bind(gateway, "127.0.0.1:0")
    behind.start()
    gateway.start()
    yield through(management, own)
    gateway.stop(0).wait()
    behind.stop(0).wait()


def test_a_call_and_its_answer(address: str) -> None:
    with make_channel(address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        assert stub.Compile(coordinator_pb2.CompileRequest(cirh="text"), timeout=SECONDS).artifact == "text"
        future = stub.Compile.future(coordinator_pb2.CompileRequest(cirh="later"), timeout=SECONDS)
        assert future.result().artifact == "later"


def test_streams_go_message_by_message(address: str) -> None:
    requests: queue.SimpleQueue[coordinator_pb2.ExecuteRequest | None] = queue.SimpleQueue()
    with make_channel(address) as channel:
        answers = coordinator_pb2_grpc.CoordinatorStub(channel).Execute(iter(requests.get, None), timeout=SECONDS)
        for step in (1, 2, 3):  # each is answered before the next is sent
            requests.put(coordinator_pb2.ExecuteRequest(consumed=coordinator_pb2.Consumed(step=step)))
            assert next(answers).checkpoint.step == step
        requests.put(None)
        assert next(answers, None) is None


def test_errors_come_through_with_code_and_reason(address: str) -> None:
    with make_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        coordinator_pb2_grpc.CoordinatorStub(channel).Compile(coordinator_pb2.CompileRequest(), timeout=SECONDS)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "there is no text"


def test_a_client_that_leaves_is_seen_to_leave(address: str, coordinator: Coordinator) -> None:
    with make_channel(address) as channel:
        session = coordinator_pb2_grpc.CoordinatorStub(channel).Session(coordinator_pb2.SessionRequest(token="t"))
        assert next(iter(session)).failure.message == "t"
        session.cancel()
        assert coordinator.left.wait(SECONDS)


def test_other_addresses_and_other_services_are_closed(address: str) -> None:
    _, _, management = address.partition(" via ")
    with make_channel(through(management, "127.0.0.1:1")) as channel, pytest.raises(grpc.RpcError) as refused:
        coordinator_pb2_grpc.CoordinatorStub(channel).Compile(
            coordinator_pb2.CompileRequest(cirh="text"), timeout=SECONDS
        )
    assert "no coordinator and no MemoryX node of this cluster is at 127.0.0.1:1" in str(refused.value.details())
    with make_channel(address) as channel, pytest.raises(grpc.RpcError) as unknown:
        list(node_pb2_grpc.NodeServiceStub(channel).Attach(iter([node_pb2.AttachRequest()]), timeout=SECONDS))
    assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED
