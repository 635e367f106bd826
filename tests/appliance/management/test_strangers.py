"""What somebody without a token, or with another's, tries on a cluster: each of these once worked."""

import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from cluster_in_process import Client, ClusterInProcess
from tokens_shown import shown, token

from waferbox.rpc.server import make_channel
from waferbox.security.tokens import Kind
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    management_pb2,
    management_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    observation_pb2,
    observation_pb2_grpc,
)

SECONDS = 10.0
ONE = {"memoryx": 1, "swarmx": 1, "wafer": 1, "workers": 1}
IDLE_STREAMS = 300
REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def refused(call: Callable[[], object]) -> grpc.StatusCode:
    """The status of a call that must not be let in."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert caught.value.code() in REFUSED, caught.value.details()
    return caught.value.code()


def hello(role: "node_pb2.Role.ValueType", **fields: Any) -> management_pb2.RegisterRequest:
    return management_pb2.RegisterRequest(role=role, address="127.0.0.1:1", version=WIRE_VERSION, **fields)


def test_a_stranger_gets_no_job(cluster: ClusterInProcess) -> None:
    request = management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1)
    with make_channel(cluster.address, "") as channel:
        refused(lambda: management_pb2_grpc.ManagementStub(channel).CreateJob(request, timeout=SECONDS))
    assert not cluster.jobs()


@pytest.mark.parametrize("shows", ["nothing", "job", "user", "another's lease", "an earlier lease", "another job's"])
def test_a_stranger_attaches_to_no_node(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch, shows: str
) -> None:
    """A worker would have run his input_fn."""
    cluster.add(workers=1)
    _, node = cluster.nodes[0]
    instance = node._registration.instance
    tokens = {
        "nothing": "",
        "job": token(Kind.JOB, "job-1"),
        "user": token(Kind.USER, "ada"),
        "another's lease": token(Kind.LEASE, "job-1", "another", "5"),
        "an earlier lease": token(Kind.LEASE, "job-1", instance, "5"),
        "another job's": token(Kind.LEASE, "job-2", instance, "7"),
    }

    def attach(credential: str) -> list[node_pb2.AttachResponse]:
        request = node_pb2.AttachRequest(attach=node_pb2.AttachJob(job="job-1", node="worker-0"))
        with make_channel(node.address, credential) as channel:
            return list(node_pb2_grpc.NodeServiceStub(channel).Attach(iter([request]), timeout=SECONDS))

    assert attach(token(Kind.LEASE, "job-1", instance, "6"))[0].HasField("attached")
    if shows == "another job's":
        assert attach(tokens[shows]) == []
    else:
        refused(lambda: attach(tokens[shows]))


def test_a_node_that_was_given_up_takes_nobody_who_had_it_before(cluster: ClusterInProcess) -> None:
    cluster.add(workers=1)
    _, node = cluster.nodes[0]
    before = node._registration.instance
    (registered,) = cluster.stub.ListNodes(management_pb2.ListNodesRequest()).nodes
    cluster.call(lambda: cluster.service._registry.remove(registered.node_id, "a test"))
    cluster.until(lambda: node._registration.instance != before)
    with make_channel(node.address, token(Kind.LEASE, "job-1", before, str(time.time_ns()))) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        attach = node_pb2.AttachRequest(attach=node_pb2.AttachJob(job="job-1", node="worker-0"))
        refused(lambda: list(stub.Attach(iter([attach]), timeout=SECONDS)))


def test_leases_are_told_to_the_jobs_coordinator_alone(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**ONE)
    client().compile()
    (job,) = cluster.jobs()
    assert len(job.nodes) == 3
    assert not any(node.lease for node in job.nodes)
    assert not any(node.lease for node in cluster.stub.ListNodes(management_pb2.ListNodesRequest()).nodes)


@pytest.mark.parametrize("names", [(), (Kind.USER, "eve"), (Kind.JOB, "job-1")])
def test_a_stranger_registers_no_node(cluster: ClusterInProcess, names: tuple[Any, ...]) -> None:
    with make_channel(cluster.address, token(*names) if names else "") as channel:
        register = management_pb2_grpc.ManagementStub(channel).Register
        refused(lambda: next(iter(register(iter([hello(node_pb2.ROLE_WAFER)]), timeout=SECONDS))))
    assert not cluster.stub.ListNodes(management_pb2.ListNodesRequest()).nodes


def test_a_stranger_takes_the_place_of_no_member(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    """The job would have ended, and blamed a node that is well."""
    cluster.add(**ONE)
    one = client()
    one.compile()
    with make_channel(cluster.address, one.created.token) as channel:
        register = management_pb2_grpc.ManagementStub(channel).Register
        impostor = hello(node_pb2.ROLE_WAFER, job=one.created.job, member="wafer-0")
        refused(lambda: next(iter(register(iter([impostor]), timeout=SECONDS))))
    one.compile("again")


def test_idle_streams_of_strangers_do_not_stop_management(
    cluster: ClusterInProcess, client: Callable[..., Client]
) -> None:
    cluster.add(**ONE)
    with make_channel(cluster.address, "") as channel:
        register = management_pb2_grpc.ManagementStub(channel).Register
        streams = [register(iter(())) for _ in range(IDLE_STREAMS)]
        codes = {stream.code() for stream in streams}  # each is over before it has said a word
    assert codes <= set(REFUSED)
    client().compile()


@pytest.mark.parametrize("names", [(), (Kind.USER, "eve"), (Kind.JOB, "job-of-eve")])
def test_a_job_is_its_users_alone(
    cluster: ClusterInProcess, client: Callable[..., Client], names: tuple[Any, ...]
) -> None:
    cluster.add(**ONE)
    one = client(user="ada")
    one.compile()
    name = one.created.job
    with make_channel(cluster.address, token(*names) if names else "") as channel:
        management = management_pb2_grpc.ManagementStub(channel)
        observation = observation_pb2_grpc.ObservationStub(channel)
        for call in (
            lambda: management.CancelJob(management_pb2.CancelJobRequest(job=name), timeout=SECONDS),
            lambda: management.SetPriority(management_pb2.SetPriorityRequest(job=name, priority=1), timeout=SECONDS),
            lambda: management.LabelJob(management_pb2.LabelJobRequest(job=name, add=["a=b"]), timeout=SECONDS),
            lambda: management.Shutdown(management_pb2.ShutdownRequest(), timeout=SECONDS),
            lambda: list(observation.WatchJob(observation_pb2.WatchJobRequest(job=name), timeout=SECONDS)),
            lambda: list(observation.TraceJob(observation_pb2.TraceJobRequest(job=name, num_steps=1), timeout=SECONDS)),
        ):
            refused(call)
    one.compile("again")
    assert not cluster.shutdown.is_set()


def test_its_user_may_do_with_a_job_what_he_likes(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(**ONE)
    request = management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1, user="bob")
    with make_channel(cluster.address, token(Kind.USER, "ada")) as channel:
        management = management_pb2_grpc.ManagementStub(channel)
        created = management.CreateJob(request, timeout=SECONDS)
        (job,) = management.ListJobs(management_pb2.ListJobsRequest(), timeout=SECONDS).jobs
        assert job.user == "ada"  # as the token says, whatever the script says
        management.LabelJob(management_pb2.LabelJobRequest(job=created.job, add=["a=b"]), timeout=SECONDS)
        management.CancelJob(management_pb2.CancelJobRequest(job=created.job), timeout=SECONDS)
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_CANCELLED)


@pytest.mark.parametrize("kind", [Kind.JOB, Kind.USER, Kind.ADMIN])
def test_a_coordinator_serves_its_own_script_alone(
    cluster: ClusterInProcess, client: Callable[..., Client], kind: Kind
) -> None:
    cluster.add(**ONE)
    one = client()
    request = coordinator_pb2.CompileRequest(token=one.created.token, cirh="good")
    with make_channel(one.created.coordinator, token(kind, "job-of-eve")) as channel:
        refused(lambda: coordinator_pb2_grpc.CoordinatorStub(channel).Compile(request, timeout=SECONDS))


def test_nobody_speaks_for_another_jobs_coordinator(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    one = client()
    takes_over = management_pb2.CoordinatorHello(job=one.created.job, address="127.0.0.1:1", token=one.created.token)
    call = cluster.stub.Coordinate(
        iter([management_pb2.CoordinateRequest(hello=takes_over)]), metadata=shown(Kind.COORDINATOR, "job-of-eve")
    )
    refused(lambda: next(iter(call)))
    with make_channel(cluster.address, one.created.token) as channel:
        script = management_pb2_grpc.ManagementStub(channel)
        refused(lambda: next(iter(script.Coordinate(iter([management_pb2.CoordinateRequest(hello=takes_over)])))))
