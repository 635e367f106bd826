"""Text that no client of ours would send, straight to the compile service of a real coordinator."""

from collections.abc import Iterator

import grpc
import psutil
import pytest
from cluster_rig import RunningCluster

from waferbox.rpc.server import make_channel
from waferbox.wire_version import WIRE_VERSION
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc, management_pb2, management_pb2_grpc

pytestmark = pytest.mark.cluster

BODY = "module {{ func @graph(%a: tensor<4xf32>) -> (tensor<4xf32>) {{ {} return %a : tensor<4xf32> }} }}"
GOOD = (
    'module { func @graph(%a: tensor<4xf32> {cs.input_name = "input_0"}) -> (tensor<4xf32> {cs.output_name = "x"}) {'
    " %0 = cirh.Relu %a : tensor<4xf32> return %0 : tensor<4xf32> } }"
)
HOSTILE = {
    "no module": "import os; os.abort()",
    "deep nesting": "module {" * 200_000,
    "nested lists": BODY.format(f"%0 = cirh.Const dense<{'[' * 100_000}1{']' * 100_000}> : tensor<1xf32>"),
    "huge constant": BODY.format(f"%0 = cirh.Const dense<[{'1.0, ' * 1_500_000}1.0]> : tensor<1500001xf32>"),
    "huge tensor": BODY.replace("tensor<4xf32>", "tensor<999999999999999xf32>").format(""),
    "lying shape": BODY.format("%0 = cirh.Relu %a : tensor<5xf32>"),
    "unknown operation": BODY.format("%0 = os.system %a : tensor<4xf32>"),
    "a name that looks like code": BODY.format('%0 = aten.__import__("os") %a : tensor<4xf32>'),
    "an attribute that looks like code": BODY.format(
        '%0 = cirh.Gelu %a {approximation = "\\"; import os; os.abort()"} : tensor<4xf32>'
    ),
    "division by zero": BODY.format(
        "%0 = aten.roll %a {shifts = dense<1> : tensor<1xi64>, dims = dense<0> : tensor<0xi64>}"
        " : (tensor<4xf32>) -> tensor<4xf32>"
    ),
    "endless range": BODY.format(
        "%0 = aten.arange.start_step {start = 0 : i64, end = 9000000000000000000 : i64, step = 1 : i64}"
        " : () -> tensor<4xi64>"
    ),
}


class Job:
    """A job of one wafer, and its compile service."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._management = make_channel(cluster.management)
        request = management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1)
        created = management_pb2_grpc.ManagementStub(self._management).CreateJob(request, timeout=20)
        self._token = created.token
        self._channel = make_channel(created.coordinator, created.token)
        self._stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        self._session = self._stub.Session(coordinator_pb2.SessionRequest(token=created.token))
        self.process = cluster.process_at(created.coordinator)

    def compile(self, text: str) -> coordinator_pb2.CompileResponse:
        return self._stub.Compile(coordinator_pb2.CompileRequest(token=self._token, cirh=text), timeout=30)

    def close(self) -> None:
        self._session.cancel()  # type: ignore[no-untyped-call]  # without types in the stubs
        self._channel.close()
        self._management.close()


@pytest.fixture(scope="module")
def job(cluster: RunningCluster) -> Iterator[Job]:
    job = Job(cluster)
    yield job
    job.close()


def busy_seconds(process: psutil.Process) -> float:
    """Returns the processor time of a process, which other load does not lengthen."""
    times = process.cpu_times()
    return times.user + times.system


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_in_bounded_time_and_memory(job: Job, name: str) -> None:
    before = job.process.memory_info().rss
    start = busy_seconds(job.process)
    with pytest.raises(grpc.RpcError) as raised:
        job.compile(HOSTILE[name])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(raised.value.details() or "") < 5_000
    assert busy_seconds(job.process) - start < 10
    assert job.process.memory_info().rss - before < 400 << 20
    assert job.process.status() != psutil.STATUS_ZOMBIE


def test_the_service_goes_on(job: Job) -> None:
    with pytest.raises(grpc.RpcError):
        job.compile(HOSTILE["lying shape"])
    assert job.compile(GOOD).artifact
