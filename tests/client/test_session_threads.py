"""A defect in a task of the session reaches the script, with its traceback."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fake_cluster import FakeCluster

from cstorch._internal.session.execution.stream import ExecutionCall, ExecutionStream
from cstorch._internal.session.job import ClientJob
from cstorch._internal.session.job_session import JobSession
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import InternalError
from waferbox import deadlines
from wsc.v1 import coordinator_pb2, plan_pb2


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster()
    server = cluster.serve()
    yield cluster
    server.stop(None).wait(5)


def fail(*_: object) -> None:
    raise ZeroDivisionError("oh")


@pytest.mark.defects
def test_a_defect_in_the_session(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobSession, "_take", fail)
    job = ClientJob(cluster.address, ClusterConfig(), "")
    try:
        with pytest.raises(InternalError, match=r"(?s)ZeroDivisionError: oh.*in fail"):
            job.compile("x", plan_pb2.CompileOptions())  # the fake cluster refuses what is no step
        assert not job.alive
    finally:
        job.close()


@pytest.mark.defects
def test_a_defect_in_the_stream_of_an_execution(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExecutionCall, "_follow", fail)
    monkeypatch.setattr(deadlines, "END", replace(deadlines.END, verdict=0.1))
    job = ClientJob(cluster.address, ClusterConfig(), "")
    stream = ExecutionStream(job, coordinator_pb2.Begin(num_steps=1))
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            stream.receive("state_wanted")
        except InternalError as error:
            errors.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    thread.join(20)
    stream.close()
    job.close()
    assert len(errors) == 1
    assert "ZeroDivisionError: oh" in str(errors[0])
