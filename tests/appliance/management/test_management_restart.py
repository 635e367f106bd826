"""A management service that is started anew: nodes and coordinators tell it what it must know."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from cluster_in_process import Client, ClusterInProcess
from tokens_shown import shown

from appliance.management.nodes import registry
from waferbox import deadlines
from waferbox.host.clock import SystemClock
from waferbox.security.tokens import Kind
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import ingress_pb2, management_pb2, node_pb2, observation_pb2

TWO = {"memoryx": 2, "swarmx": 2, "wafer": 2, "workers": 2}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, retry=0.05))
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, retry=0.05))


def restart(cluster: ClusterInProcess) -> None:
    address = cluster.address
    cluster.stop_management()
    cluster.start_management(address)


def kept_log(cluster: ClusterInProcess, job: str) -> list[observation_pb2.JobEvent]:
    request = observation_pb2.WatchJobRequest(job=job, kinds=["log"])
    return [event for batch in cluster.observation.WatchJob(request, timeout=10) for event in batch.events]


def test_a_running_job_goes_on_and_the_waiting_one_keeps_its_place(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**TWO)
    running = client(num_csx=2, labels=["a=1"], user="ada")
    running.compile()
    running.begin(3)
    running.start()
    assert running.receive_outputs().step == 1
    waits = client(num_csx=2)
    cluster.until(lambda: cluster.jobs()[0].queue_position == 1)
    cluster.stub.LabelJob(management_pb2.LabelJobRequest(job=running.created.job, add=["b=2"]))
    before = {job.job: job for job in cluster.jobs()}
    logging.getLogger("wafer.test").error("before")
    cluster.until(lambda: kept_log(cluster, running.created.job))
    job_log = kept_log(cluster, running.created.job)
    assert [event.number for event in job_log] == list(range(1, len(job_log) + 1))
    members = {node.address: node.member for node in before[running.created.job].nodes}

    restart(cluster)
    late = client()  # younger than the one that waits, whichever is there first
    cluster.until(lambda: len(cluster.jobs()) == 3)
    cluster.until(lambda: {node.address: node.member for node in cluster.wait_for_nodes(8) if node.job} == members)
    cluster.until(
        lambda: (
            {job.job: job.queue_position for job in cluster.jobs() if job.queue_position}
            == {
                waits.created.job: 1,
                late.created.job: 2,
            }
        )
    )
    after = {job.job: job for job in cluster.jobs()}[running.created.job]
    assert (list(after.labels), after.user) == (["a=1", "b=2"], "ada")
    assert after.created == before[running.created.job].created
    assert after.started == pytest.approx(before[running.created.job].started, abs=1.0)
    assert {node.address: node.member for node in after.nodes} == members
    cluster.until(lambda: kept_log(cluster, running.created.job)[: len(job_log)] == job_log)

    for step in (2, 3):
        assert running.receive_outputs().step == step
        running.consumed(step)
    running.receive("finished")
    running.close()
    assert waits.compile().artifact == "artifact-good"
    ended = {job.job: job for job in cluster.jobs()}[running.created.job]
    assert ended.phase == management_pb2.JOB_PHASE_SUCCEEDED
    cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=waits.created.job))
    assert waits.failure().kind == node_pb2.Failure.KIND_CANCELLED


def test_a_job_that_ends_while_management_is_away_is_told_later(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**TWO)
    one = client()
    one.compile()
    address = cluster.address
    cluster.stop_management()
    one.close()
    cluster.start_management(address)
    cluster.until(lambda: [job.phase for job in cluster.jobs()] == [management_pb2.JOB_PHASE_SUCCEEDED])
    cluster.wait_for_nodes(8)
    cluster.until(lambda: cluster.free_nodes() == 8)


def test_nodes_are_kept_for_a_job_that_is_not_back_but_not_for_ever(
    cluster: ClusterInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = registry.NodeRegistry(5.0, SystemClock(), lambda node, reason: None)
    hello = management_pb2.RegisterRequest(role=node_pb2.ROLE_WAFER, address="h:1", job="job-1", member="wafer-3")
    keeper.add(hello)
    keeper.review()
    assert [(node.job, node.member) for node in keeper.nodes()] == [("job-1", "wafer-3")]
    monkeypatch.setattr(keeper, "_returning_until", time.monotonic())
    keeper.review()
    hello.address = "h:3"
    keeper.add(hello)  # too late as well
    assert [(node.job, node.member) for node in keeper.nodes()] == [("", ""), ("", "")]
    keeper.open("job-2", [management_pb2.NodeInfo(member="wafer-0", address="h:2")])
    keeper.add(management_pb2.RegisterRequest(role=node_pb2.ROLE_WAFER, address="h:2", job="job-2", member="wafer-0"))
    keeper.review()
    assert [node.job for node in keeper.held("job-2")] == ["job-2"]


def test_a_coordinator_that_does_not_come_back_fails_its_job(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, coordinator_return=0.1))
    request = management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1)
    hello = management_pb2.CoordinatorHello(job="job-1", address="127.0.0.1:1", request=request)
    call = iter(
        cluster.stub.Coordinate(
            iter([management_pb2.CoordinateRequest(hello=hello)]), metadata=shown(Kind.COORDINATOR, hello.job)
        )
    )
    assert next(call).job.priority == 2
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED)
    assert cluster.jobs()[0].message.startswith("its coordinator has not connected again within")
    with pytest.raises(grpc.RpcError) as caught:  # it is too late
        next(
            iter(
                cluster.stub.Coordinate(
                    iter([management_pb2.CoordinateRequest(hello=hello)]), metadata=shown(Kind.COORDINATOR, hello.job)
                )
            )
        )
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_job_that_an_ingress_tells_of_has_another_coordinator(
    cluster: ClusterInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, str, bool]] = []

    class Process:
        cause = "an end"

        async def wait(self) -> int:
            return 0

        async def close(self, seconds: float) -> None:
            pass

    async def start(request: ingress_pb2.RunCoordinatorRequest, ingress: str) -> Process:
        started.append((request.job, ingress, request.restarted))
        return Process()

    monkeypatch.setattr(cluster.processes, "start", start)
    request = management_pb2.CreateJobRequest(
        version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1, max_num_restarts=3, user="ada"
    )
    hello = management_pb2.CoordinatorHello(
        job="job-1", address="127.0.0.1:1", request=request, ingress="127.0.0.1:2", created=1.0
    )
    told = management_pb2.AdoptJobRequest(hello=hello)
    with pytest.raises(grpc.RpcError) as caught:
        cluster.stub.AdoptJob(told, metadata=shown(Kind.COORDINATOR, "job-2"))
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    for _ in range(2):
        cluster.stub.AdoptJob(told, metadata=shown(Kind.COORDINATOR, "job-1"))
    cluster.until(lambda: cluster.jobs()[0].ended)
    assert started == [("job-1", "127.0.0.1:2", True)]
    (job,) = cluster.jobs()
    assert (job.user, job.created) == ("ada", 1.0)
    request.num_csx = 1_000_000
    with pytest.raises(grpc.RpcError) as caught:
        cluster.stub.AdoptJob(
            management_pb2.AdoptJobRequest(hello=management_pb2.CoordinatorHello(job="job-3", request=request)),
            metadata=shown(Kind.COORDINATOR, "job-3"),
        )
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_coordinator_that_hangs_when_it_is_started_again_is_replaced(
    cluster: ClusterInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, hello=0.2))
    started: list[Any] = []

    class Hanging:
        cause = ""

        def __init__(self) -> None:
            self._end = asyncio.Event()

        async def wait(self) -> int:
            await self._end.wait()
            return -9

        def kill(self) -> None:
            self._end.set()

        async def close(self, seconds: float) -> None:
            pass

    async def start(*arguments: Any) -> Hanging:
        started.append(Hanging())
        return started[-1]

    monkeypatch.setattr(cluster.processes, "start", start)
    request = management_pb2.CreateJobRequest(
        version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1, max_num_restarts=3
    )
    hello = management_pb2.CoordinatorHello(job="job-1", address="127.0.0.1:1", request=request)
    cluster.stub.AdoptJob(management_pb2.AdoptJobRequest(hello=hello), metadata=shown(Kind.COORDINATOR, "job-1"))
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED)
    assert len(started) == 3
    assert cluster.jobs()[0].message.startswith("its coordinator ended with status -9, the last of 4 in 60 s")


def test_a_job_is_not_taken_over_from_who_has_no_token_for_it(cluster: ClusterInProcess) -> None:
    request = management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1)
    for job, version, code in (
        ("job-2", WIRE_VERSION, grpc.StatusCode.UNAUTHENTICATED),
        ("job-1", "0.0.7", grpc.StatusCode.FAILED_PRECONDITION),
    ):
        request.version = version
        hello = management_pb2.CoordinatorHello(job="job-1", address="127.0.0.1:1", request=request)
        with pytest.raises(grpc.RpcError) as caught:
            next(
                iter(
                    cluster.stub.Coordinate(
                        iter([management_pb2.CoordinateRequest(hello=hello)]), metadata=shown(Kind.COORDINATOR, job)
                    )
                )
            )
        assert caught.value.code() == code
    assert not cluster.jobs()
