"""Jobs on a cluster with an ingress: it runs their coordinators, which outlive the management service."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster_in_process import Client, ClusterInProcess
from tokens_shown import shown, token

from appliance.coordinator import settings
from appliance.ingress.process import Ingress, IngressSettings
from appliance.management import supervision as job_supervision
from appliance.management.supervision import CoordinatorState, Lost
from waferbox import deadlines
from waferbox.rpc.server import LARGE_MESSAGE_BYTES, SMALL_MESSAGE_BYTES, make_channel
from waferbox.security.tokens import Kind
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import ingress_pb2, ingress_pb2_grpc, management_pb2, management_pb2_grpc, node_pb2

ONE = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, retry=0.05))
    monkeypatch.setattr(deadlines, "REGISTRATION", replace(deadlines.REGISTRATION, retry=0.05))


@pytest.fixture
def ingress(cluster: ClusterInProcess, tmp_path: Path) -> Iterator[Ingress]:
    cluster.add(**ONE)
    one = Ingress(IngressSettings(management=cluster.address, cache_root=tmp_path / "cache"))
    one.start()
    cluster.wait_for_nodes(5)
    yield one
    one.close()


def run_to_the_end(one: Client, first_step: int, last_step: int) -> None:
    for step in range(first_step, last_step + 1):
        assert one.receive_outputs().step == step
        one.consumed(step)
    one.receive("finished")


def test_a_job_goes_on_while_management_is_away(
    cluster: ClusterInProcess, client: Callable[..., Client], ingress: Ingress
) -> None:
    one = client(ingress=ingress.address)
    assert one.created.gateway
    cluster.until(lambda: ingress._coordinators.count() == 1)  # its hello comes before the ingress has counted it
    one.compile()
    one.begin(3)
    one.start()
    assert one.receive_outputs().step == 1
    address = cluster.address
    cluster.stop_management()
    one.consumed(1)
    assert one.receive_outputs().step == 2
    cluster.start_management(address)
    cluster.until(lambda: [job.job for job in cluster.jobs()] == [one.created.job])
    run_to_the_end(one, 3, 3)
    one.close()
    cluster.until(lambda: [job.phase for job in cluster.jobs()] == [management_pb2.JOB_PHASE_SUCCEEDED])
    cluster.until(lambda: ingress._coordinators.count() == 0)


def test_a_client_that_came_without_the_ingress_goes_without_it(
    cluster: ClusterInProcess, client: Callable[..., Client], ingress: Ingress
) -> None:
    one = client()
    assert not one.created.gateway
    cluster.until(lambda: ingress._coordinators.count() == 1)  # where it runs all the same
    (node,) = [node for node in cluster.wait_for_nodes(5) if node.role == node_pb2.ROLE_INGRESS]
    assert (node.address, node.job) == (ingress.address, "")
    cluster.stub.CancelJob(management_pb2.CancelJobRequest(job=one.created.job))
    assert one.failure().kind == node_pb2.Failure.KIND_CANCELLED
    cluster.until(lambda: ingress._coordinators.count() == 0)
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_CANCELLED)


def test_jobs_end_with_the_ingress_which_is_named(
    cluster: ClusterInProcess, client: Callable[..., Client], ingress: Ingress
) -> None:
    one = client()
    one.compile()
    ingress.close()
    failure = one.failure()
    name = one.created.job
    assert failure.message == (
        f"{name} ended: the ingress at {ingress.address}, where its coordinator ran, went down, or the cluster did: "
        "start that again, then the script from its last checkpoint"
    )
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_CANCELLED)
    cluster.until(lambda: cluster.free_nodes() == 4)


def test_a_shutdown_ends_what_the_ingress_runs(
    cluster: ClusterInProcess, client: Callable[..., Client], ingress: Ingress
) -> None:
    one = client(ingress=ingress.address)
    one.compile()
    cluster.server.loop.run(cluster.service.close(end_jobs=True))
    assert "its cluster went down" in one.failure().message
    assert ingress._coordinators.count() == 0


class Stillborn:
    pid = 1

    def __init__(self) -> None:
        self._ended = os.eventfd(1)

    def fileno(self) -> int:
        return self._ended

    def wait(self, timeout_seconds: float | None = None) -> int:
        return 3

    def terminate(self) -> None: ...

    kill = terminate

    def close(self) -> int:
        os.close(self._ended)
        return 3


def test_a_coordinator_that_does_not_start_at_the_ingress_is_reported(
    cluster: ClusterInProcess, client: Callable[..., Client], ingress: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "spawn", lambda *arguments, outlives, end_signal: Stillborn())
    with pytest.raises(grpc.RpcError) as caught:
        client(ingress=ingress.address)
    assert "its coordinator ended with status 3" in str(caught.value.details())
    assert cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED


def test_an_ingress_that_is_gone_is_named(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = management_pb2.RegisterRequest(role=node_pb2.ROLE_INGRESS, address="127.0.0.1:1", version=WIRE_VERSION)
    cluster.service._registry.add(gone)
    with pytest.raises(grpc.RpcError) as caught:
        client()
    assert "did not start: the ingress at 127.0.0.1:1 does not run it" in str(caught.value.details())


def test_the_ingress_is_asked_again_for_a_coordinator_whose_connection_broke(
    cluster: ClusterInProcess, client: Callable[..., Client], ingress: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the job gets no successor."""
    monkeypatch.setattr(job_supervision, "INGRESS_RETRY_SECONDS", 0.05)
    one = client()
    one.compile()
    supervision = cluster.service._supervisor._supervisions[one.created.job]
    process = supervision._process
    assert process is not None
    cluster.call(lambda: supervision.handle(Lost(process, "its connection broke")))
    cluster.until(lambda: supervision.state is CoordinatorState.CONNECTED and supervision._process is not None)
    assert supervision._process is not process
    assert ingress._coordinators.count() == 1
    one.close()
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_SUCCEEDED)


def test_a_coordinator_that_has_ended_is_not_awaited(ingress: Ingress) -> None:
    request = ingress_pb2.RunCoordinatorRequest(job="job-1", restarted=True, only_await=True)
    with pytest.raises(grpc.RpcError) as caught:
        cluster_ingress(ingress.address, request)
    assert caught.value.details() == "it has ended, alone or with an earlier ingress"
    assert ingress._coordinators.count() == 0


def test_a_job_has_one_coordinator(cluster: ClusterInProcess, client: Callable[..., Client], ingress: Ingress) -> None:
    one = client()
    request = ingress_pb2.RunCoordinatorRequest(job=one.created.job)
    with pytest.raises(grpc.RpcError) as caught:
        cluster_ingress(ingress.address, request)
    assert caught.value.details() == f"{one.created.job} has a coordinator"


def cluster_ingress(address: str, request: ingress_pb2.RunCoordinatorRequest) -> ingress_pb2.RunCoordinatorResponse:
    with grpc.insecure_channel(address) as channel:
        return ingress_pb2_grpc.IngressStub(channel).RunCoordinator(
            request, timeout=10, metadata=shown(Kind.MANAGEMENT)
        )


def test_messages_that_are_too_large_are_refused_with_the_cap(
    cluster: ClusterInProcess, client: Callable[..., Client], ingress: Ingress
) -> None:
    with pytest.raises(grpc.RpcError) as caught:  # by management, behind the ingress
        client(ingress=ingress.address, user="u" * (SMALL_MESSAGE_BYTES + 1))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(SMALL_MESSAGE_BYTES) in str(caught.value.details())
    one = client(ingress=ingress.address)
    with pytest.raises(grpc.RpcError) as caught:  # by the ingress, which takes what a coordinator takes
        one.compile("c" * (LARGE_MESSAGE_BYTES + 1))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(LARGE_MESSAGE_BYTES) in str(caught.value.details())


def test_an_ingress_has_artifacts_below_its_own_roots_only(ingress: Ingress) -> None:
    request = ingress_pb2.RunCoordinatorRequest(job="job-1", compile_dir="/etc")
    with pytest.raises(grpc.RpcError) as caught:
        cluster_ingress(ingress.address, request)
    assert "--compile-root" in str(caught.value.details())


@pytest.mark.parametrize("names", [(), (Kind.USER, "eve"), (Kind.JOB, "job-of-eve"), (Kind.ADMIN,), (Kind.NODE,)])
def test_coordinators_are_managements_to_start_and_to_end(
    cluster: ClusterInProcess, client: Callable[..., Client], ingress: Ingress, names: tuple[Any, ...]
) -> None:
    """The port of an ingress is the one that a cluster of containers shows to the world."""
    one = client(ingress=ingress.address)
    with make_channel(ingress.address, token(*names) if names else "") as channel:
        stub = ingress_pb2_grpc.IngressStub(channel)
        for call in (
            lambda: stub.EndCoordinator(ingress_pb2.EndCoordinatorRequest(job=one.created.job, kill=True), timeout=10),
            lambda: stub.RunCoordinator(ingress_pb2.RunCoordinatorRequest(job="job-of-eve"), timeout=10),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    cluster.until(lambda: ingress._coordinators.count() == 1)  # its hello comes before the ingress has counted it
    one.compile()


def test_an_ingress_lends_nobody_its_own_token(ingress: Ingress, cluster: ClusterInProcess) -> None:
    request = management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1)
    with make_channel(ingress.address, "") as channel, pytest.raises(grpc.RpcError) as caught:
        management_pb2_grpc.ManagementStub(channel).CreateJob(request, timeout=10)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert not cluster.jobs()
