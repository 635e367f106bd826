"""The management service: registration, leases, versions, jobs."""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster_in_process import Client, ClusterInProcess
from tokens_shown import shown

from appliance.coordinator.settings import FolderRefused, cache_directory
from appliance.finished_jobs import FILE, FinishedJobs
from appliance.management import jobs
from appliance.management.nodes import registry
from appliance.management.supervision import TRANSITIONS, CoordinatorState, Exited, Supervision
from waferbox import __version__, deadlines
from waferbox.security.tokens import Kind
from waferbox.wire_version import MISMATCH_REMEDY, WIRE_VERSION
from wsc.v1 import coordinator_pb2, management_pb2, node_pb2


def hello(
    role: int = node_pb2.ROLE_WAFER, version: str = WIRE_VERSION, address: str = "127.0.0.1:1"
) -> management_pb2.RegisterRequest:
    return management_pb2.RegisterRequest(role=role, address=address, host="h", version=version, process_id=7)  # type: ignore[arg-type]


class Registering:
    """A Register stream by hand."""

    def __init__(self, cluster: ClusterInProcess, first: management_pb2.RegisterRequest) -> None:
        self.requests: queue.SimpleQueue[management_pb2.RegisterRequest | None] = queue.SimpleQueue()
        self.requests.put(first)
        self.call = cluster.stub.Register(iter(self.requests.get, None), metadata=shown(Kind.NODE))

    def beat(self) -> None:
        self.requests.put(management_pb2.RegisterRequest())

    def close(self) -> None:
        self.requests.put(None)
        self.call.cancel()  # type: ignore[no-untyped-call]  # without types in the stubs


@pytest.fixture
def registering(cluster: ClusterInProcess) -> Iterator[Callable[..., Registering]]:
    made: list[Registering] = []

    def make(first: management_pb2.RegisterRequest) -> Registering:
        made.append(Registering(cluster, first))
        return made[-1]

    yield make
    for one in made:
        one.close()


def nodes(cluster: ClusterInProcess) -> list[management_pb2.NodeInfo]:
    return list(cluster.stub.ListNodes(management_pb2.ListNodesRequest()).nodes)


def test_a_node_is_there_until_its_stream_ends(
    cluster: ClusterInProcess, registering: Callable[..., Registering]
) -> None:
    one = registering(hello())
    answer = next(iter(one.call))
    assert answer.lease_seconds == 5.0
    (node,) = nodes(cluster)
    assert (node.node_id, node.role, node.address, node.process_id) == (
        answer.node_id,
        node_pb2.ROLE_WAFER,
        "127.0.0.1:1",
        7,
    )
    assert 4 < node.lease_left_seconds <= 5
    one.call.cancel()  # type: ignore[no-untyped-call]  # likewise
    cluster.until(lambda: not nodes(cluster), seconds=2)


@pytest.mark.parametrize(
    ("first", "code", "text"),
    [
        (hello(version=__version__), grpc.StatusCode.FAILED_PRECONDITION, __version__),
        (hello(version="0.0.7"), grpc.StatusCode.FAILED_PRECONDITION, "0.0.7"),
        (hello(version=""), grpc.StatusCode.FAILED_PRECONDITION, "unknown"),
        (hello(role=node_pb2.ROLE_COORDINATOR), grpc.StatusCode.INVALID_ARGUMENT, "role"),
        (
            management_pb2.RegisterRequest(role=node_pb2.ROLE_WAFER, version=WIRE_VERSION),
            grpc.StatusCode.INVALID_ARGUMENT,
            "address",
        ),
        (
            management_pb2.RegisterRequest(role=node_pb2.ROLE_WAFER, version=WIRE_VERSION, address="a" * 257),
            grpc.StatusCode.INVALID_ARGUMENT,
            "256 characters, not 257",
        ),
    ],
)
def test_foreign_nodes_are_refused(
    cluster: ClusterInProcess, registering: Callable[..., Registering], first: Any, code: grpc.StatusCode, text: str
) -> None:
    one = registering(first)
    with pytest.raises(grpc.RpcError) as caught:
        next(iter(one.call))
    assert caught.value.code() == code
    assert text in str(caught.value.details())
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        assert WIRE_VERSION in str(caught.value.details())
        assert MISMATCH_REMEDY in str(caught.value.details())
    assert not nodes(cluster)


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        ({"version": __version__}, grpc.StatusCode.FAILED_PRECONDITION, "this client is of Waferbox version '0.1.0'"),
        ({"version": "9.9.9"}, grpc.StatusCode.FAILED_PRECONDITION, "9.9.9"),
        ({"num_csx": 0}, grpc.StatusCode.INVALID_ARGUMENT, "num_csx"),
        ({"num_csx": 100_000}, grpc.StatusCode.INVALID_ARGUMENT, "num_csx"),
        ({"command": ["x"] * 300}, grpc.StatusCode.INVALID_ARGUMENT, "command has at most 256 arguments"),
        ({"command": ["x" * 9000]}, grpc.StatusCode.INVALID_ARGUMENT, "and 8192 characters"),
        ({"num_csx": 2, "min_num_csx": 3}, grpc.StatusCode.INVALID_ARGUMENT, "min_num_csx must be 0 to 2"),
        ({"num_workers_per_csx": 0}, grpc.StatusCode.INVALID_ARGUMENT, "num_workers_per_csx"),
        ({"compile_dir": "../../etc"}, grpc.StatusCode.INVALID_ARGUMENT, "compile_dir"),
        ({"compile_dir": "/etc"}, grpc.StatusCode.INVALID_ARGUMENT, "--compile-root"),
        ({"compile_dir": "a\0b"}, grpc.StatusCode.INVALID_ARGUMENT, "null"),
        ({"compile_dir": "d" * 5000}, grpc.StatusCode.INVALID_ARGUMENT, "4096"),
        ({"labels": ["a=1"] * 65}, grpc.StatusCode.INVALID_ARGUMENT, "64 labels, not 65"),
        ({"user": "u" * 257}, grpc.StatusCode.INVALID_ARGUMENT, "256 characters"),
    ],
)
def test_impossible_jobs_are_refused(
    cluster: ClusterInProcess, client: Callable[..., Client], settings: dict[str, Any], code: grpc.StatusCode, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client(**settings)
    assert caught.value.code() == code
    assert text in str(caught.value.details())
    assert not cluster.jobs()


def test_a_silent_node_loses_its_lease(make_cluster: Callable[[float], ClusterInProcess]) -> None:
    cluster = make_cluster(1.5)
    silent, lively = Registering(cluster, hello()), Registering(cluster, hello(address="127.0.0.1:2"))
    kept = next(iter(lively.call)).node_id
    gone = next(iter(silent.call)).node_id
    begin = time.monotonic()
    while gone in [node.node_id for node in nodes(cluster)]:
        lively.beat()
        threading.Event().wait(0.05)
        assert time.monotonic() - begin < 10
    assert time.monotonic() - begin > 1.2
    assert [node.node_id for node in nodes(cluster)] == [kept]
    # It speaks again: its stream ends, so that it registers anew.
    silent.beat()
    assert list(silent.call) == []
    for one in (silent, lively):
        one.close()


def test_a_node_that_registers_again_is_one_node(
    cluster: ClusterInProcess, registering: Callable[..., Registering]
) -> None:
    first = registering(hello())
    next(iter(first.call))
    again = next(iter(registering(hello()).call)).node_id  # its first stream broke, which management has not noticed
    assert [node.node_id for node in nodes(cluster)] == [again]
    first.beat()
    assert list(first.call) == []


def test_a_node_comes_back_by_itself(cluster: ClusterInProcess) -> None:
    cluster.add(wafer=1)
    (before,) = nodes(cluster)
    cluster.service._registry.remove(before.node_id, "test")
    cluster.until(lambda: nodes(cluster) and nodes(cluster)[0].node_id != before.node_id)


def test_finished_jobs_stay_in_the_list_up_to_a_number(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    names = []
    for _ in range(2):
        one = client(labels=["user=me"])
        one.compile()
        names.append(one.created.job)
        one.close()
        cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_SUCCEEDED)
    assert [job.job for job in cluster.jobs()] == names[::-1]
    assert list(cluster.jobs()[0].labels) == ["user=me"]
    cluster.until(lambda: cluster.jobs()[0].coordinator == "")  # the process ends after the job
    assert cluster.service._jobs._finished.maxlen == 100


def test_a_job_is_stored_at_its_end_and_before_the_end_of_the_service(
    cluster: ClusterInProcess, client: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    finished = FinishedJobs(cluster.settings.cache_root)
    first = client(labels=["user=me"], command=["/train.py"])
    first.close()
    cluster.until(lambda: len(finished.jobs()) == 1)
    (job,) = finished.jobs()
    assert (job.job, list(job.labels), list(job.command)) == (first.created.job, ["user=me"], ["/train.py"])
    assert job.phase == management_pb2.JOB_PHASE_CANCELLED
    assert [event.log.verdict for event in finished.events(job.job).events if event.HasField("log")][-1]

    second = client()
    cluster.server.loop.run(cluster.service.close(end_jobs=True))
    assert {job.job for job in finished.jobs()} == {first.created.job, second.created.job}
    assert "not kept" not in caplog.text


def test_a_bad_file_of_finished_jobs_harms_no_job(
    cluster: ClusterInProcess, client: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    cluster.settings.cache_root.mkdir(exist_ok=True)
    (cluster.settings.cache_root / FILE).write_bytes(b"no database" * 1000)
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    for _ in range(2):
        one = client()
        one.compile()
        one.close()
        cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_SUCCEEDED)
    cluster.until(lambda: not cluster.service._storing)
    assert caplog.text.count("Finished jobs are not kept beyond the cluster") == 1
    assert not cluster.defects


def test_a_coordinator_must_know_its_token(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    one = client()
    request = management_pb2.CoordinateRequest(
        hello=management_pb2.CoordinatorHello(job=one.created.job, address="127.0.0.1:1", token="guessed")
    )
    with pytest.raises(grpc.RpcError) as caught:
        next(iter(cluster.stub.Coordinate(iter([request]), metadata=shown(Kind.COORDINATOR, "job-other"))))
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_coordinator_that_does_not_start_is_reported(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    from appliance.coordinator import settings

    class Stillborn:
        pid = 1
        cause = ""

        def wait(self) -> int:
            return 3

        def fileno(self) -> int:
            return ended

        terminate = kill = close = lambda self: None

    ended = os.eventfd(1)
    monkeypatch.setattr(settings, "spawn", lambda *arguments, outlives, end_signal: Stillborn())
    with pytest.raises(grpc.RpcError) as caught:
        client()
    os.close(ended)
    assert "status 3" in str(caught.value.details())
    assert cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED


def test_a_client_that_never_comes_does_not_keep_a_job(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, session=0.2))
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    cluster.stub.CreateJob(
        management_pb2.CreateJobRequest(version=WIRE_VERSION, num_csx=1, num_workers_per_csx=1), timeout=20
    )
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_CANCELLED)
    cluster.until(lambda: cluster.free_nodes() == 4)


def test_shutdown_is_answered_and_asked_for(cluster: ClusterInProcess) -> None:
    cluster.stub.Shutdown(management_pb2.ShutdownRequest(), timeout=5)
    assert cluster.shutdown.wait(5)


def test_list_nodes_waits_for_as_many_as_asked(
    cluster: ClusterInProcess, registering: Callable[..., Registering]
) -> None:
    begin = time.monotonic()
    request = management_pb2.ListNodesRequest(at_least=1, wait_seconds=0.3)
    assert not cluster.stub.ListNodes(request).nodes
    assert time.monotonic() - begin >= 0.3
    threading.Timer(0.1, lambda: registering(hello())).start()
    assert len(cluster.stub.ListNodes(management_pb2.ListNodesRequest(at_least=1, wait_seconds=10)).nodes) == 1


def test_a_wrong_token_does_not_compile(cluster: ClusterInProcess, client: Callable[..., Client]) -> None:
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    one = client()
    with pytest.raises(grpc.RpcError) as caught:
        one.stub.PrepareInput(coordinator_pb2.PrepareInputRequest(token="guess"), timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_cluster_has_so_many_nodes_and_jobs(
    cluster: ClusterInProcess,
    client: Callable[..., Client],
    registering: Callable[..., Registering],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "MAX_NODES", 1)
    next(iter(registering(hello()).call))
    with pytest.raises(grpc.RpcError) as caught:
        next(iter(registering(hello(address="127.0.0.1:2")).call))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the cluster has 1 nodes" in str(caught.value.details())
    monkeypatch.setattr(jobs, "MAX_LIVE", 1)
    client()
    with pytest.raises(grpc.RpcError) as caught:
        client()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "wait until one ends, or cancel one" in str(caught.value.details())


@pytest.mark.parametrize(
    "request_",
    [
        management_pb2.CoordinateRequest(acquire=management_pb2.Acquire(num_wafers=2**31, num_workers_per_wafer=1)),
        management_pb2.CoordinateRequest(acquire=management_pb2.Acquire(num_wafers=1, num_workers_per_wafer=2**31)),
        management_pb2.CoordinateRequest(report=management_pb2.JobReport(artifacts=["a"] * 100)),
    ],
)
def test_what_a_coordinator_counts_has_limits(
    cluster: ClusterInProcess, client: Callable[..., Client], request_: management_pb2.CoordinateRequest
) -> None:
    one = client()
    first = management_pb2.CoordinateRequest(
        hello=management_pb2.CoordinatorHello(job=one.created.job, address="127.0.0.1:1", token=one.created.token)
    )
    shows = shown(Kind.COORDINATOR, one.created.job)
    with pytest.raises(grpc.RpcError) as caught:
        list(cluster.stub.Coordinate(iter([first, request_]), timeout=10, metadata=shows))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_name_of_any_length_is_not_found(cluster: ClusterInProcess) -> None:
    """An error is told with a part of it: the whole would not fit where errors travel."""
    for length in (10, 60_000):
        with pytest.raises(grpc.RpcError) as caught:
            cluster.stub.GetJob(management_pb2.GetJobRequest(job="j" * length))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        details = caught.value.details()
        assert details is not None
        assert len(details) < 500


@pytest.mark.parametrize("compile_root", [None, "plans"])
def test_artifacts_lie_below_the_roots_also_behind_links(tmp_path: Path, compile_root: str | None) -> None:
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    cache.mkdir()
    elsewhere.mkdir()
    root = None if compile_root is None else tmp_path / compile_root
    (cache / "out").symlink_to(elsewhere)
    (cache / "in").symlink_to(cache / "deep")
    assert cache_directory(cache, root, "mine") == cache / "mine"
    assert cache_directory(cache, root, "in/mine") == cache / "deep" / "mine"
    assert cache_directory(cache, root, str(cache / "mine")) == cache / "mine"
    for refused in (str(elsewhere), "out/mine", "a/../../b", "/", "a\0b"):
        with pytest.raises(FolderRefused, match="--compile-root"):
            cache_directory(cache, root, refused)
    if root is None:
        with pytest.raises(FolderRefused, match=str(cache)):
            cache_directory(cache, root, str(tmp_path / "plans" / "mine"))
    else:
        assert cache_directory(cache, root, str(root / "mine")) == root / "mine"
    assert cache_directory(cache, Path("/"), str(elsewhere)) == elsewhere


@pytest.mark.defects
def test_a_defect_in_the_watch_ends_the_service_loudly(
    make_cluster: Callable[[float], ClusterInProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster(0.2)

    def broken() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(cluster.service._registry, "review", broken)
    cluster.until(lambda: cluster.defects)
    assert "A defect in the supervision of nodes" in caplog.text
    assert [str(defect) for defect in cluster.defects] == ["a defect"]
    cluster.defects.clear()


@pytest.mark.defects
def test_a_defect_in_the_watch_of_a_coordinator_ends_its_job(
    cluster: ClusterInProcess, client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Supervision, event: Exited) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setitem(TRANSITIONS[CoordinatorState.EXPECTED], Exited, broken)
    monkeypatch.setitem(TRANSITIONS[CoordinatorState.CONNECTED], Exited, broken)
    one = client()
    one.close()
    cluster.until(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED)
    assert "a defect" in cluster.jobs()[0].message
