"""Calls through an ingress."""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokens_shown import token

from appliance.ingress import targets
from appliance.ingress.process import Ingress, IngressSettings
from waferbox.rpc.address import bind
from waferbox.rpc.async_server import AsyncServer, Context
from waferbox.rpc.server import INGRESS_KEY, is_from_ingress, make_channel, make_server, through
from waferbox.security.tokens import Kind
from wsc.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    management_pb2,
    management_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
)

pytestmark = pytest.mark.services

SECONDS = 10.0
NUM_OPEN = 300


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers with what it was sent, and knows who left."""

    # No test calls these, which the stubs call abstract.
    PrepareInput = coordinator_pb2_grpc.CoordinatorServicer.PrepareInput
    Shards = coordinator_pb2_grpc.CoordinatorServicer.Shards
    Finish = coordinator_pb2_grpc.CoordinatorServicer.Finish

    def __init__(self) -> None:
        self.left = threading.Event()

    def Compile(
        self, request: coordinator_pb2.CompileRequest, context: grpc.ServicerContext
    ) -> coordinator_pb2.CompileResponse:
        if not request.cirh:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "there is no text")
        return coordinator_pb2.CompileResponse(artifact=request.cirh)

    def Session(
        self, request: coordinator_pb2.SessionRequest, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.SessionResponse]:
        context.add_callback(self.left.set)
        yield coordinator_pb2.SessionResponse(failure=node_pb2.Failure(message=request.token))
        self.left.wait(SECONDS)

    def Execute(
        self, request_iterator: Any, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.ExecuteResponse]:
        for request in request_iterator:
            yield coordinator_pb2.ExecuteResponse(
                checkpoint=coordinator_pb2.CheckpointReady(step=request.consumed.step)
            )


class Management(management_pb2_grpc.ManagementServicer):
    """Takes everybody, and knows the jobs that a test tells it."""

    # No test calls these, which the stubs call abstract.
    CreateJob = management_pb2_grpc.ManagementServicer.CreateJob
    Coordinate = management_pb2_grpc.ManagementServicer.Coordinate
    AdoptJob = management_pb2_grpc.ManagementServicer.AdoptJob
    GetJob = management_pb2_grpc.ManagementServicer.GetJob
    CancelJob = management_pb2_grpc.ManagementServicer.CancelJob
    SetPriority = management_pb2_grpc.ManagementServicer.SetPriority
    Shutdown = management_pb2_grpc.ManagementServicer.Shutdown

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.jobs: list[management_pb2.JobInfo] = []
        self.server = make_server()
        management_pb2_grpc.add_ManagementServicer_to_server(self, self.server)
        self.address = bind(self.server, address)
        self.server.start()

    def Register(
        self, request_iterator: Any, context: grpc.ServicerContext
    ) -> Iterator[management_pb2.RegisterResponse]:
        for _ in request_iterator:
            yield management_pb2.RegisterResponse(node_id="n0", lease_seconds=5.0)

    def ListJobs(
        self, request: management_pb2.ListJobsRequest, context: grpc.ServicerContext
    ) -> management_pb2.ListJobsResponse:
        return management_pb2.ListJobsResponse(jobs=self.jobs)

    def ListNodes(
        self, request: management_pb2.ListNodesRequest, context: grpc.ServicerContext
    ) -> management_pb2.ListNodesResponse:
        return management_pb2.ListNodesResponse()

    def LabelJob(
        self, request: management_pb2.LabelJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.LabelJobResponse:
        """Labels: the names of the metadata that came along."""
        names = [key for key, _ in context.invocation_metadata() if key.startswith("wsc-")]
        return management_pb2.LabelJobResponse(labels=names)

    def close(self) -> None:
        self.server.stop(0).wait()


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def management() -> Iterator[Management]:
    one = Management()
    yield one
    one.close()


@pytest.fixture
def ingress(management: Management, tmp_path: Path) -> Iterator[str]:
    one = Ingress(IngressSettings(management=management.address, cache_root=tmp_path))
    one.start()
    yield one.address
    one.close()


@pytest.fixture
def address(coordinator: Coordinator, management: Management, ingress: str) -> Iterator[str]:
    """The coordinator's, through an ingress that lets nobody reach anything else."""
    behind = make_server()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(coordinator, behind)
    own = bind(behind, "127.0.0.1:0")
    behind.start()
    management.jobs.append(management_pb2.JobInfo(job="job-1", coordinator=own))
    yield through(ingress, own)
    behind.stop(0).wait()


def test_a_call_and_its_answer(address: str) -> None:
    with make_channel(address, token(Kind.JOB, "job-1")) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        assert stub.Compile(coordinator_pb2.CompileRequest(cirh="text"), timeout=SECONDS).artifact == "text"
        future = stub.Compile.future(coordinator_pb2.CompileRequest(cirh="later"), timeout=SECONDS)
        assert future.result().artifact == "later"


def test_streams_go_message_by_message(address: str) -> None:
    requests: queue.SimpleQueue[coordinator_pb2.ExecuteRequest | None] = queue.SimpleQueue()
    with make_channel(address, token(Kind.JOB, "job-1")) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        answers = iter(stub.Execute(iter(requests.get, None), timeout=SECONDS))
        for step in (1, 2, 3):  # each is answered before the next is sent
            requests.put(coordinator_pb2.ExecuteRequest(consumed=coordinator_pb2.Consumed(step=step)))
            assert next(answers).checkpoint.step == step
        requests.put(None)
        assert next(answers, None) is None


def test_errors_come_through_with_code_and_reason(address: str) -> None:
    with make_channel(address, token(Kind.JOB, "job-1")) as channel, pytest.raises(grpc.RpcError) as refused:
        coordinator_pb2_grpc.CoordinatorStub(channel).Compile(coordinator_pb2.CompileRequest(), timeout=SECONDS)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "there is no text"


def test_a_client_that_leaves_is_seen_to_leave(address: str, coordinator: Coordinator) -> None:
    with make_channel(address, token(Kind.JOB, "job-1")) as channel:
        session = coordinator_pb2_grpc.CoordinatorStub(channel).Session(coordinator_pb2.SessionRequest(token="t"))
        assert next(iter(session)).failure.message == "t"
        session.cancel()  # type: ignore[no-untyped-call]  # without types in the stubs
        assert coordinator.left.wait(SECONDS)


class OpenCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Sessions that stay open, without a thread."""

    # No test calls these, which the stubs call abstract.
    Compile = coordinator_pb2_grpc.CoordinatorServicer.Compile
    PrepareInput = coordinator_pb2_grpc.CoordinatorServicer.PrepareInput
    Execute = coordinator_pb2_grpc.CoordinatorServicer.Execute
    Shards = coordinator_pb2_grpc.CoordinatorServicer.Shards
    Finish = coordinator_pb2_grpc.CoordinatorServicer.Finish

    async def Session(
        self, request: coordinator_pb2.SessionRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.SessionResponse]:
        yield coordinator_pb2.SessionResponse(failure=node_pb2.Failure(message=request.token))
        await asyncio.Event().wait()


def test_calls_that_are_open_keep_no_threads(management: Management, ingress: str) -> None:
    behind = AsyncServer(on_defect=lambda error: pytest.fail(str(error)))
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(OpenCoordinator(), behind.server)
    own = bind(behind.server, "127.0.0.1:0")
    behind.start()
    management.jobs.append(management_pb2.JobInfo(job="job-1", coordinator=own))
    threads = threading.active_count()
    with make_channel(through(ingress, own), token(Kind.JOB, "job-1")) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        sessions = [stub.Session(coordinator_pb2.SessionRequest(token=str(number))) for number in range(NUM_OPEN)]
        assert [next(iter(session)).failure.message for session in sessions] == [
            str(number) for number in range(NUM_OPEN)
        ]
        assert threading.active_count() - threads < NUM_OPEN / 10
        for session in sessions:
            session.cancel()  # type: ignore[no-untyped-call]  # without types in the stubs
    behind.stop(0)


def test_other_addresses_and_other_services_are_closed(address: str, ingress: str) -> None:
    with (
        make_channel(through(ingress, "127.0.0.1:1"), token(Kind.JOB, "job-1")) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        coordinator_pb2_grpc.CoordinatorStub(channel).Compile(
            coordinator_pb2.CompileRequest(cirh="text"), timeout=SECONDS
        )
    assert "no coordinator and no node with states of this cluster is at 127.0.0.1:1" in str(refused.value.details())
    with make_channel(address, token(Kind.JOB, "job-1")) as channel, pytest.raises(grpc.RpcError) as unknown:
        list(node_pb2_grpc.NodeServiceStub(channel).Attach(iter([node_pb2.AttachRequest()]), timeout=SECONDS))
    assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_calls_without_an_address_are_for_management_and_say_how_they_came(ingress: str) -> None:
    with make_channel(ingress) as channel:
        labels = management_pb2_grpc.ManagementStub(channel).LabelJob(management_pb2.LabelJobRequest(), timeout=SECONDS)
    assert labels.labels == [INGRESS_KEY]


def test_a_stream_outlives_management_and_new_calls_find_their_way(
    address: str, ingress: str, management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "FRESH_SECONDS", 0.0)
    requests: queue.SimpleQueue[coordinator_pb2.ExecuteRequest | None] = queue.SimpleQueue()
    with make_channel(address, token(Kind.JOB, "job-1")) as channel, make_channel(ingress) as own:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        answers = iter(stub.Execute(iter(requests.get, None), timeout=3 * SECONDS))

        def step(number: int) -> None:
            requests.put(coordinator_pb2.ExecuteRequest(consumed=coordinator_pb2.Consumed(step=number)))
            assert next(answers).checkpoint.step == number

        step(1)
        management.close()
        with pytest.raises(grpc.RpcError) as away:
            management_pb2_grpc.ManagementStub(own).ListJobs(management_pb2.ListJobsRequest(), timeout=SECONDS)
        assert away.value.code() == grpc.StatusCode.UNAVAILABLE
        assert f"no management service answers it at {management.address}: start it again" in str(away.value.details())
        assert is_from_ingress(away.value)
        step(2)
        assert stub.Compile(coordinator_pb2.CompileRequest(cirh="text"), timeout=SECONDS).artifact == "text"

        second = Management(management.address)  # to which the coordinator has not come back yet
        until(lambda: management_answers(own))
        step(3)
        assert stub.Compile(coordinator_pb2.CompileRequest(cirh="text"), timeout=SECONDS).artifact == "text"
        requests.put(None)
        assert next(answers, None) is None
        second.close()


def management_answers(channel: grpc.Channel) -> bool:
    try:
        management_pb2_grpc.ManagementStub(channel).ListJobs(management_pb2.ListJobsRequest(), timeout=SECONDS)
    except grpc.RpcError:
        return False
    return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def test_a_target_that_management_names_no_more_is_closed_after_a_while(
    address: str, management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(targets, "RETURN_SECONDS", 0.2)
    with make_channel(address, token(Kind.JOB, "job-1")) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        session = stub.Session(coordinator_pb2.SessionRequest(token="t"))
        assert next(iter(session)).failure.message == "t"
        management.jobs.clear()
        assert stub.Compile(coordinator_pb2.CompileRequest(cirh="text"), timeout=SECONDS).artifact == "text"

        def is_closed() -> bool:
            call = stub.Compile.future(coordinator_pb2.CompileRequest(cirh="text"), timeout=SECONDS)
            error = call.exception()
            return isinstance(error, grpc.RpcError) and "no coordinator" in str(error.details())

        until(is_closed)
        assert session.is_active()  # what is under way stays
        session.cancel()  # type: ignore[no-untyped-call]  # without types in the stubs
