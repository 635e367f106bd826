"""Executions: what the client gets, in which order, and how far the cluster runs ahead."""

import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster_in_process import Client, ClusterInProcess, kinds, run

from appliance.coordinator.execution.epoch import Epoch
from appliance.management.requests import is_artifact
from waferbox import deadlines
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2, plan_pb2

FULL = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}


def floats(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def test_outputs_come_in_order_with_their_values(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(memoryx=2, swarmx=1, wafer=2, workers=2)
    one = client(num_csx=2)
    compiled = one.compile()
    assert compiled.artifact == "artifact-good"
    assert sorted((state.name, state.shard) for state in compiled.states) == [
        ("step", 0),
        ("step", 1),
        ("weight.0", 0),
        ("weight.1", 1),
    ]
    responses = run(one, 20)
    assert kinds(responses) == [f"outputs {step}" for step in range(1, 21)] + ["finished"]
    loss, parts, state = responses[4].outputs.steps[0].tensors
    assert floats(loss) == [5.0]
    assert floats(state) == [5.0]
    # Two wafers sent (2, 3) each, one after the other: 5..10 and 11..16.
    assert floats(parts) == [5, 6, 7, 11, 12, 13, 8, 9, 10, 14, 15, 16]
    assert responses[-1].finished.seconds["wafer-1.compute"] == 1.5
    assert cluster.behaviour.prepared == {}


def test_every_node_gets_its_part_and_its_links(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(memoryx=2, swarmx=1, wafer=2, workers=4)
    one = client(num_csx=2, num_workers_per_csx=2)
    one.stub.PrepareInput(
        coordinator_pb2.PrepareInputRequest(
            token=one.created.token, input=node_pb2.PrepareInput(loader="train", builder=b"pickle")
        ),
        timeout=20,
    )
    one.compile()
    one.begin(1)
    wanted = one.start()
    assert wanted.missing == ["step", "weight.0", "weight.1"]
    assert [shard.shard for shard in wanted.shards] == [0, 1]
    prepared = cluster.behaviour.prepared
    assert {(name, p.wafer, p.worker, p.num_workers, p.num_csx) for name, p in prepared.items()} == {
        ("worker-0", 0, 0, 2, 2),
        ("worker-1", 0, 1, 2, 2),
        ("worker-2", 1, 0, 2, 2),
        ("worker-3", 1, 1, 2, 2),
    }
    assert cluster.behaviour.loads["worker-3"][0].loader == "train"
    links = cluster.behaviour.links
    assert links["wafer-1"] == {
        (node_pb2.LINK_PURPOSE_PARENT, 0),
        (node_pb2.LINK_PURPOSE_WORKER, 0),
        (node_pb2.LINK_PURPOSE_WORKER, 1),
    }
    assert links["swarmx-0"] == {
        (node_pb2.LINK_PURPOSE_SHARD, 0),
        (node_pb2.LINK_PURPOSE_SHARD, 1),
        (node_pb2.LINK_PURPOSE_CHILD, 0),
        (node_pb2.LINK_PURPOSE_CHILD, 1),
        (node_pb2.LINK_PURPOSE_COORDINATOR, 0),
    }
    assert links["memoryx-1"] == {(node_pb2.LINK_PURPOSE_SWARMX, 0), (node_pb2.LINK_PURPOSE_SHARD, 0)}


def test_outputs_and_checkpoints_come_in_the_order_of_the_steps(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    one = client()
    one.compile()
    responses = run(one, 7, activation_steps=3, checkpoint_steps=(2, 3, 7))
    told = kinds(responses)
    # Outputs of later steps may come along; a checkpoint never comes before the outputs of its own step.
    assert [kind for kind in told if kind.startswith("outputs")] == ["outputs 3", "outputs 6", "outputs 7"]
    assert [kind for kind in told if kind.startswith("check")] == ["checkpoint 2", "checkpoint 3", "checkpoint 7"]
    assert told[0] == "checkpoint 2"
    assert told.index("outputs 3") < told.index("checkpoint 3")
    assert told.index("outputs 7") < told.index("checkpoint 7")
    assert told[-1] == "finished"
    assert cluster.behaviour.released == {"memoryx-0": [2, 3, 7]}


def test_a_plan_without_outputs_runs(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)
    one = client()
    one.compile("silent")
    assert kinds(run(one, 5, artifact="artifact-silent")) == ["finished"]


def test_the_cluster_runs_ahead_to_the_bound_and_no_further(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    one = client(run_ahead_steps=4)
    one.compile()
    one.begin(30)
    one.start()
    cluster.until(lambda: len(cluster.behaviour.sent) == 4)
    assert one.receive_outputs().step == 1
    threading.Event().wait(0.2)
    assert cluster.behaviour.sent == [1, 2, 3, 4]
    one.consumed(1)
    cluster.until(lambda: len(cluster.behaviour.sent) == 5)
    for step in range(2, 31):
        one.consumed(step - 1)
        assert one.receive_outputs().step == step
    one.consumed(30)
    one.receive("finished")


def test_a_second_execution_follows_on_the_same_state(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**FULL)
    one = client()
    one.compile()
    assert kinds(run(one, 2))[-1] == "finished"
    again, other = one.compile(), one.compile("silent")
    assert (again.artifact, again.cached) == ("artifact-good", True)  # nothing is compiled
    assert other.artifact == "artifact-silent-placed"  # the placement of the first is handed on
    one.begin(1)
    wanted = one.start()
    assert not wanted.missing
    one.receive("outputs")
    one.consumed(1)
    one.receive("finished")
    assert sorted(cluster.behaviour.stopped).count("wafer-0") == 2
    one.close()
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_SUCCEEDED)
    cluster.until(lambda: cluster.free_nodes() == 4)


def test_the_last_execution_is_told_with_all_steps_and_the_artifacts_of_all(
    cluster: ClusterInProcess, client: Callable[..., Client], tmp_path: Path
) -> None:
    cluster.add(**FULL)
    one = client(compile_dir="mine")
    one.compile()
    assert not cluster.jobs()[0].artifacts
    one.compile("silent")
    for artifact in ("artifact-good", "artifact-silent-placed", "artifact-good"):
        run(one, 3, artifact=artifact)
    one.close()
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_SUCCEEDED)
    (job,) = cluster.jobs()
    assert (job.step, job.num_steps) == (3, 3)
    folder = tmp_path / "cache" / "mine"
    assert job.artifacts == [str(folder / "artifact-silent-placed"), str(folder / "artifact-good")]


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", "a.b", "x" * 129, "a\n"])
def test_what_cannot_be_an_artifact_names_no_file(name: str) -> None:
    assert not is_artifact(name)


def test_only_one_execution_at_a_time(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "ATTACHMENT", replace(deadlines.ATTACHMENT, left_execution=0.2))
    cluster.add(**FULL)
    one = client()
    one.compile()
    one.begin(100)
    one.start()
    first = one.call
    one.begin(1)
    with pytest.raises(grpc.RpcError) as caught:
        next(one.call)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    first.cancel()


def test_an_execution_that_the_client_leaves_can_be_followed_by_another_at_once(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**FULL)
    cluster.behaviour.on_stop["wafer-0"] = lambda: time.sleep(0.5)  # a step that takes its time
    one = client(run_ahead_steps=2)
    one.compile()
    one.begin(100)
    one.start()
    one.receive("outputs")
    one.call.cancel()
    assert kinds(run(one, 2)) == ["outputs 1", "outputs 2", "finished"]


def test_an_execution_that_the_client_leaves_closes_its_links_when_all_nodes_have_stopped(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_before_close: list[list[str]] = []
    close = Epoch.close

    def stop_late() -> None:
        time.sleep(0.2)

    async def close_after(epoch: Epoch) -> None:
        stopped_before_close.append(list(cluster.behaviour.stopped))
        await close(epoch)

    monkeypatch.setattr(Epoch, "close", close_after)
    cluster.add(**FULL)
    cluster.behaviour.on_stop["memoryx-0"] = stop_late
    one = client(run_ahead_steps=2)
    one.compile()
    one.begin(100)
    one.start()
    one.receive("outputs")
    one.call.cancel()
    cluster.until(lambda: stopped_before_close)
    assert "memoryx-0" in stopped_before_close[0]


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda one: one.compile("refuse"), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda one: one.compile("defect"), grpc.StatusCode.INTERNAL),
        (
            lambda one: one.stub.Compile(coordinator_pb2.CompileRequest(token="x", cirh="good"), timeout=5),
            grpc.StatusCode.UNAUTHENTICATED,
        ),
        (
            lambda one: next(one.stub.Session(coordinator_pb2.SessionRequest(token="x"))),
            grpc.StatusCode.UNAUTHENTICATED,
        ),
        (
            lambda one: next(one.stub.Session(coordinator_pb2.SessionRequest(token=one.created.token))),
            grpc.StatusCode.ALREADY_EXISTS,
        ),
        (lambda one: (one.begin(1, artifact="unknown"), next(one.call)), grpc.StatusCode.NOT_FOUND),
        (lambda one: (one.begin(0), next(one.call)), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda one: (one.begin(1 << 60), next(one.call)), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda one: (one.begin(1, activation_steps=1 << 60), next(one.call)), grpc.StatusCode.INVALID_ARGUMENT),
        (
            lambda one: (one.begin(1, checkpoint_steps=tuple(range((1 << 20) + 1))), next(one.call)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            lambda one: one.stub.Compile(coordinator_pb2.CompileRequest(token="é", cirh="good"), timeout=5),
            grpc.StatusCode.UNAUTHENTICATED,
        ),
        (
            lambda one: one.stub.Compile(
                coordinator_pb2.CompileRequest(
                    token=one.created.token,
                    cirh="good",
                    options=plan_pb2.CompileOptions(execution_strategy=plan_pb2.EXECUTION_STRATEGY_PIPELINE),
                ),
                timeout=5,
            ),  # the job has the nodes for weight streaming
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
def test_bad_requests_are_refused_and_the_job_lives_on(
    cluster: ClusterInProcess, client: Callable[..., Client], make: Callable[[Any], object], code: grpc.StatusCode
) -> None:
    cluster.add(**FULL)
    one = client()
    one.compile()
    with pytest.raises(grpc.RpcError) as caught:
        make(one)
    assert caught.value.code() == code
    assert kinds(run(one, 1)) == ["outputs 1", "finished"]
