"""Jobs that wait for their turn, as the script and the administrator see it."""

import time
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from cluster_in_process import Client, ClusterInProcess

from waferbox import deadlines
from wsc.v1 import coordinator_pb2, management_pb2

TWO = {"memoryx": 2, "swarmx": 2, "wafer": 2, "workers": 2}


def info(cluster: ClusterInProcess, client: Client) -> management_pb2.JobInfo:
    return cluster.stub.GetJob(management_pb2.GetJobRequest(job=client.created.job)).job


def position(cluster: ClusterInProcess, client: Client) -> int:
    return info(cluster, client).queue_position


def news_of(client: Client) -> coordinator_pb2.SessionResponse:
    return next(iter(client.session))


def test_two_jobs_run_side_by_side_and_the_third_waits_visibly(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**TWO)
    first, second = client(user="ada", host="here"), client()
    for one in (first, second):
        assert one.compile().artifact == "artifact-good"
        assert news_of(one).WhichOneof("kind") == "ready"  # nothing of a queue
    described = info(cluster, first)
    assert (described.user, described.host, described.priority, described.num_csx) == ("ada", "here", 2, 1)
    assert {node.member for node in described.nodes} == {"wafer-0", "worker-0", "memoryx-0"}
    assert 0 < described.created <= described.started <= time.time()
    own, others = ({node.node_id for node in info(cluster, one).nodes} for one in (first, second))
    assert not own & others

    third = client()
    told = news_of(third).queue
    assert (told.position, told.length) == (1, 1)
    names = ", ".join(sorted([first.created.job, second.created.job]))
    assert told.waiting_for.startswith(f"1 wafer, held by {names}; ")
    waiting = info(cluster, third)
    assert (waiting.queue_position, waiting.waiting_for) == (1, told.waiting_for)
    assert waiting.phase == management_pb2.JOB_PHASE_QUEUED
    assert not waiting.started

    first.close()
    assert news_of(third).queue.position == 0
    assert news_of(third).WhichOneof("kind") == "ready"
    assert third.compile().artifact == "artifact-good"
    ended = info(cluster, first)
    assert len(ended.nodes) == 3
    assert ended.created < ended.started < ended.ended <= time.time()


def test_a_job_waits_longer_than_missing_nodes_are_waited_for(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, missing_nodes=0.0))
    cluster.add(memoryx=1, swarmx=2, wafer=2, workers=2)
    first = client()
    first.compile()
    second = client()
    assert news_of(second).queue.waiting_for == f"1 MemoryX node, held by {first.created.job}"
    cluster.call(cluster.service._registry.review)
    first.close()
    assert second.compile().artifact == "artifact-good"


def test_priority_reorders_the_queue(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    running = client()
    running.compile()
    early, late, urgent = client(), client(), client(priority=1)
    cluster.until(lambda: [position(cluster, one) for one in (urgent, early, late)] == [1, 2, 3])
    assert info(cluster, early).waiting_for == f"1 wafer, held by {running.created.job}; " + "; ".join(
        f"1 {noun}, held by {running.created.job}" for noun in ("input worker", "MemoryX node")
    )
    cluster.stub.SetPriority(management_pb2.SetPriorityRequest(job=late.created.job, priority=1))
    cluster.stub.SetPriority(management_pb2.SetPriorityRequest(job=urgent.created.job, priority=3))
    assert [position(cluster, one) for one in (late, early, urgent)] == [1, 2, 3]
    running.close()
    assert late.compile().artifact == "artifact-good"
    with pytest.raises(grpc.RpcError) as caught:
        cluster.stub.SetPriority(management_pb2.SetPriorityRequest(job=late.created.job, priority=4))
    assert "1 (first) to 3, not 4" in str(caught.value.details())


def test_a_client_that_leaves_the_queue_is_out_of_it_at_once(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    running = client()
    running.compile()
    leaves, stays = client(), client()
    cluster.until(lambda: position(cluster, stays) == 2)
    begin = time.monotonic()
    leaves.close()
    cluster.until(lambda: info(cluster, leaves).phase == management_pb2.JOB_PHASE_CANCELLED)
    assert time.monotonic() - begin < 2.0
    assert info(cluster, leaves).message == "the client left while it waited for nodes"
    assert position(cluster, stays) == 1


def test_a_waiting_job_can_be_cancelled(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    running = client()
    running.compile()
    waits = client()
    cluster.until(lambda: position(cluster, waits) == 1)
    cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=waits.created.job))
    assert waits.failure().message == f"{waits.created.job} was cancelled"
    cluster.until(lambda: info(cluster, waits).ended)


def test_labels_are_added_replaced_and_removed(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    one = client(labels=["a=1", "b=2"])

    def label(add: list[str], remove: list[str]) -> list[str]:
        request = management_pb2.LabelJobRequest(job=one.created.job, add=add, remove=remove)
        return list(cluster.stub.LabelJob(request).labels)

    assert label(["c=3", "a=4"], ["b", "absent"]) == ["a=4", "c=3"]
    assert list(info(cluster, one).labels) == ["a=4", "c=3"]
    with pytest.raises(grpc.RpcError) as caught:
        label(["no"], [])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    one.close()
    cluster.until(lambda: info(cluster, one).ended)
    assert label(["d=5"], []) == ["a=4", "c=3", "d=5"]


def test_the_end_of_a_job_can_be_waited_for(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**TWO)
    one = client()
    asked = cluster.stub.GetJob.future(management_pb2.GetJobRequest(job=one.created.job, wait_seconds=10), timeout=20)
    assert not info(cluster, one).ended  # asked after the other call, and answered before it
    assert not asked.done()
    one.close()
    assert asked.result().job.ended


def test_a_job_that_nobody_knows_is_not_found(cluster: ClusterInProcess) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        cluster.stub.GetJob(management_pb2.GetJobRequest(job="job-0"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
