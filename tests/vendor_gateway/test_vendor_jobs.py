"""Jobs as the vendor's client asks for them: no cluster is needed until it compiles."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from vendor_gateway.process import GatewaySettings, VendorGateway
from vendor_gateway.session import VendorSession
from vendor_gateway.sessions import MAX_SESSIONS
from vendor_wire import (
    appliance_pb2,
    appliance_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    management_pb2,
    management_pb2_grpc,
)
from waferbox import deadlines

VERSION = ("client-build-version", "2.10.0")


@pytest.fixture
def gateway() -> Iterator[VendorGateway]:
    settings = GatewaySettings(management="127.0.0.1:1", listen="127.0.0.1:0", input_python="python")
    gateway = VendorGateway(settings)
    gateway.start()
    yield gateway
    gateway.close()


@pytest.fixture
def channel(gateway: VendorGateway) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(gateway.address) as channel:
        yield channel


@pytest.fixture
def management(channel: grpc.Channel) -> management_pb2_grpc.ClusterManagementStub:
    return management_pb2_grpc.ClusterManagementStub(channel)


def compile_job(management: management_pb2_grpc.ClusterManagementStub, workflow: str = "w") -> str:
    request = management_pb2.CompileJobRequest()
    metadata = (VERSION, ("workflow-id", workflow))
    return management.InitCompileJob(request, metadata=metadata, timeout=10).job_id


def status(management: management_pb2_grpc.ClusterManagementStub, job: str) -> management_pb2.JobResponse:
    return management.GetJob(management_pb2.JobRequest(job_id=job), timeout=10)


def appliance(gateway: VendorGateway, job: str) -> appliance_pb2_grpc.ApplianceStub:
    channel = grpc.insecure_channel(gateway.address, options=[("grpc.default_authority", job)])
    return appliance_pb2_grpc.ApplianceStub(channel)


def test_a_job_is_ready_at_once_and_hears_its_release(
    gateway: VendorGateway, management: management_pb2_grpc.ClusterManagementStub
) -> None:
    job = compile_job(management)
    (ingress,) = management.PollIngressV2(management_pb2.JobRequest(job_id=job), timeout=10)
    assert ingress.is_ready
    assert ingress.service_authority == job
    version = appliance(gateway, job).UnaryStart(appliance_pb2.Unread(), timeout=10).version_info
    assert version.version == "2.10.0"
    assert version.githash
    assert status(management, job).status == management_pb2.JOB_STATUS_IN_PROGRESS


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_step_without_text_is_the_lowering_of_the_client_that_failed(
    gateway: VendorGateway, management: management_pb2_grpc.ClusterManagementStub, text: str
) -> None:
    """So it is with inputs in uint8, int8 and float64."""
    request = appliance_pb2.CompileRequest(cirh=text, num_csx=1)
    with pytest.raises(grpc.RpcError) as caught:
        appliance(gateway, compile_job(management)).UnaryCompile(request, timeout=10)
    assert caught.value.code() is grpc.StatusCode.INTERNAL  # type: ignore[attr-defined]
    for part in ("sent no text", "validate_only=True", "uint8", "x.to(torch.int32)"):
        assert part in caught.value.details()  # type: ignore[attr-defined]


def test_another_release_is_refused_with_the_one_to_install(
    management: management_pb2_grpc.ClusterManagementStub,
) -> None:
    metadata = (("client-build-version", "2.5.0"), ("workflow-id", "w"))
    with pytest.raises(grpc.RpcError) as caught:
        management.InitCompileJob(management_pb2.CompileJobRequest(), metadata=metadata, timeout=10)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]
    assert "install 2.10.0" in caught.value.details()  # type: ignore[attr-defined]


def test_the_end_of_a_job_is_told(management: management_pb2_grpc.ClusterManagementStub) -> None:
    done, given_up = compile_job(management, "a"), compile_job(management, "b")
    management.FinalizeCompileJob(management_pb2.JobRequest(job_id=done), timeout=10)
    cancelled = management_pb2.CancelJobRequest(job_id=given_up, job_status=management_pb2.JOB_STATUS_CANCELLED)
    management.CancelJobV2(cancelled, timeout=10)
    assert status(management, done).status == management_pb2.JOB_STATUS_SUCCEEDED
    assert status(management, given_up).status == management_pb2.JOB_STATUS_CANCELLED
    assert "canceled-by-csctl" in status(management, given_up).message
    assert status(management, "wsjob-unknown").status == management_pb2.JOB_STATUS_FAILED


def test_a_client_that_dies_before_its_first_beat_has_gone(
    gateway: VendorGateway, management: management_pb2_grpc.ClusterManagementStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "VENDOR_CLIENT", replace(deadlines.VENDOR_CLIENT, gone=0.2))
    closed: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(VendorSession, "close", lambda session, reason: closed.put(session.workflow))
    compile_job(management, "other")
    over = threading.Event()

    def beats() -> Iterator[management_pb2.HeartbeatRequest]:
        over.wait(60)
        yield from ()

    with grpc.insecure_channel(gateway.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        dying = management_pb2_grpc.ClusterManagementStub(channel)
        compile_job(dying, "dying")
        stream = dying.HeartbeatV2(beats())  # without its workflow, as the vendor's client does
        with pytest.raises(queue.Empty):
            closed.get(timeout=1)
        assert stream.is_active()
    over.set()
    assert closed.get(timeout=10) == "dying"


def test_names_that_nobody_was_given_lead_nowhere(
    gateway: VendorGateway, management: management_pb2_grpc.ClusterManagementStub
) -> None:
    stub = appliance(gateway, "wsjob-0000000000000000")
    assert "there is no job" in stub.UnaryInit(appliance_pb2.Unread(), timeout=10).message
    (output,) = stub.GetOutputStream(appliance_pb2.GetOutputRequest(tensor_name="x"), timeout=10)
    assert output.code == appliance_pb2.STATUS_CODE_UNKNOWN
    job = compile_job(management)
    stub = appliance(gateway, job)
    for answer in (
        stub.UnaryLoad(appliance_pb2.LoadRequest(artifact="/etc/passwd"), timeout=10),
        stub.UnaryRun(appliance_pb2.RunRequest(num_iterations=1), timeout=10),
        stub.UnaryStartStreaming(appliance_pb2.Unread(), timeout=10),
        stub.UnaryMoveToPTR(appliance_pb2.RepositoryRequest(id=1, tensor_name="w"), timeout=10),
        stub.UnaryCarryOverFromPTR(appliance_pb2.CarryOverRequest(id=1, tensor_name="w"), timeout=10),
    ):
        assert answer.code == appliance_pb2.STATUS_CODE_UNKNOWN, answer
    requests = iter([appliance_pb2.SendInputRequest(tensor_name="w")])
    (refused,) = stub.SendInputBidirStream(requests, timeout=10)
    assert refused.code == appliance_pb2.STATUS_CODE_UNKNOWN


def test_there_are_not_more_clients_than_are_served(management: management_pb2_grpc.ClusterManagementStub) -> None:
    for number in range(MAX_SESSIONS):
        compile_job(management, f"w{number}")
    compile_job(management, "w0")
    with pytest.raises(grpc.RpcError) as caught:
        compile_job(management, "another")
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]


def test_there_is_nothing_to_look_up(channel: grpc.Channel) -> None:
    stub = control_pb2_grpc.CsCtlV1Stub(channel)
    assert stub.Get(control_pb2.GetRequest(type="volumes"), timeout=10).raw == b""


def test_the_priority_of_a_job_can_be_changed(gateway: VendorGateway, channel: grpc.Channel) -> None:
    control = control_pb2_grpc.CsCtlV1Stub(channel)
    job = compile_job(management_pb2_grpc.ClusterManagementStub(channel))

    def change(job: str, priority: str) -> str:
        request = control_pb2.UpdateJobPriorityRequest(job_id=job, job_priority=priority)
        return control.UpdateJobPriority(request, timeout=10).message

    assert change(job, "p1") == f"{job} has the priority p1"
    assert change(job, "3") == f"{job} has the priority p3"
    for wrong_job, priority, code in (
        (job, "p0", grpc.StatusCode.INVALID_ARGUMENT),
        (job, "first", grpc.StatusCode.INVALID_ARGUMENT),
        ("another", "p1", grpc.StatusCode.NOT_FOUND),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            change(wrong_job, priority)
        assert caught.value.code() is code  # type: ignore[attr-defined]
