"""The vendor gateway of a real cluster, as its recorded client speaks with it."""

import json
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from cluster_rig import RunningCluster, StartCluster, wait_for
from recorded_calls import Call, Client, recorded

from vendor_gateway.wire_values import read_value
from vendor_wire import appliance_pb2, management_pb2
from wsc.v1 import management_pb2 as wsc_management_pb2

STAND_IN = Path(__file__).parent / "vendor" / "stand_in"
sys.path.insert(0, str(STAND_IN))
import recorded_input  # type: ignore[import-not-found]  # noqa: E402  # beside a module called dill

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, start_cluster: StartCluster) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("vendor") / "own"
    with start_cluster(folder, "--vendor-python", sys.executable, wafers=1, memoryx=1) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[Client]:
    (config,) = cluster.surroundings.temporary.glob("*.csconfig")
    client = Client(json.loads(config.read_text())["clusters"][0]["server"])
    yield client
    client.cancel()
    client.close()
    wait_for(lambda: all(not node.job for node in cluster.nodes()))


def with_input(call: Call, complaint: str = "") -> Call:
    """The call with an input that can be read here."""
    (request,) = call.requests
    if call.name == "UnaryRun":
        run = appliance_pb2.RunRequest.FromString(request)
        run.dataloader.builder = pickle.dumps(recorded_input.input_fn).hex()
        run.dataloader.arguments = pickle.dumps(((complaint,), {})).hex()
        return replace(call, requests=[run.SerializeToString()])
    if call.name == "InitExecuteJob":
        job = management_pb2.ExecuteJobRequest.FromString(request)
        job.python_paths.append(str(STAND_IN))
        return replace(call, requests=[job.SerializeToString()])
    return call


def value_of(response: bytes) -> torch.Tensor:
    value = appliance_pb2.GetOutputResponse.FromString(response)
    assert not value.code, value.message
    return read_value(value.value.element_type, bytearray(value.value.tensor.data))


def until(calls: list[Call], name: str) -> list[Call]:
    """The calls before the first of that name, and that."""
    names = [call.name for call in calls]
    return calls[: names.index(name) + 1]


def test_the_recorded_client_trains_saves_and_evaluates(cluster: RunningCluster, client: Client) -> None:
    num_values = 0
    for call in recorded():
        responses = client.say(with_input(call) if len(call.requests) == 1 else call)
        if call.name in ("GetOutputStream", "GetFromPTRStream"):
            for then, now in zip(call.responses, responses, strict=True):
                torch.testing.assert_close(value_of(now), value_of(then), rtol=1e-5, atol=1e-6)
                num_values += 1
        elif call.method.startswith("/cerebras.Appliance/") and call.name not in ("UnaryCompile", "UnaryStart"):
            assert [each[:2] for each in responses] == [each[:2] for each in call.responses], call.name
        if call.name == "UnaryStartStreaming":
            job = cluster.jobs()[0]
            assert "purpose=record" in job.labels
            assert job.priority == 1
    assert num_values > 10
    wait_for(lambda: cluster.jobs()[0].phase == wsc_management_pb2.JOB_PHASE_SUCCEEDED)


def test_an_input_function_that_raises_is_explained(client: Client) -> None:
    complaint = "the disk of the data is gone"
    for call in until(recorded(), "GetOutputStream"):
        responses = client.say(with_input(call, complaint) if len(call.requests) == 1 else call)
        answer = appliance_pb2.Outcome.FromString(responses[-1]) if responses else appliance_pb2.Outcome()
        if call.name in ("UnaryRun", "UnaryStartStreaming", "GetOutputStream") and answer.code:
            assert complaint in answer.message
            return
    raise AssertionError("nobody complained")


def test_a_client_that_vanishes_leaves_the_nodes_free(cluster: RunningCluster, client: Client) -> None:
    calls = recorded()
    for call in until(calls, "UnaryRun"):
        client.say(with_input(call) if len(call.requests) == 1 else call)
    assert any(node.job for node in cluster.nodes())
    (job,) = {call.authority for call in calls if call.name == "UnaryRun"}
    over = threading.Event()

    def beats() -> Iterator[bytes]:
        yield management_pb2.HeartbeatRequest(job_id=client.now(job)).SerializeToString()
        over.wait(60)

    answers = client.stream("/cluster.cluster_mgmt_pb.ClusterManagement/HeartbeatV2", beats())
    next(answers)
    answers.cancel()
    over.set()
    begin = time.monotonic()
    wait_for(lambda: all(not node.job for node in cluster.nodes()))
    assert time.monotonic() - begin < 30


def test_a_step_that_has_no_plan_is_refused_with_the_compilers_words(client: Client) -> None:
    calls = until(recorded(), "UnaryCompile")
    for call in calls[:-1]:
        client.say(call)
    request = appliance_pb2.CompileRequest.FromString(calls[-1].requests[0])
    request.cirh = request.cirh.replace("cirh.MatMul", "cirh.Frobnicate")
    with pytest.raises(grpc.RpcError) as caught:
        client.say(replace(calls[-1], requests=[request.SerializeToString()]))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "cirh.Frobnicate" in str(caught.value.details())
