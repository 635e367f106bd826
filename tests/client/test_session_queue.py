"""What a script says and does while its job waits in the queue."""

import getpass
import logging
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fake_cluster import FakeCluster

from cstorch._internal.session.job import ClientJob
from cstorch.distributed.cluster_config import ClusterConfig
from waferbox import deadlines
from wsc.v1 import management_pb2, node_pb2, plan_pb2


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster()
    server = cluster.serve()
    yield cluster
    server.stop(None).wait(5)


def test_the_script_says_where_it_waits_and_calls_only_then(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, compile=5.0))
    cluster.waits = [
        management_pb2.QueueStatus(position=2, length=3, waiting_for="1 wafer, held by job-a"),
        management_pb2.QueueStatus(position=1, length=2, waiting_for="1 wafer, held by job-b"),
        management_pb2.QueueStatus(),
    ]
    job = ClientJob(cluster.address, ClusterConfig(job_priority="p1"), "")
    with caplog.at_level(logging.INFO, "cstorch.job"):
        job.compile('{"states": [], "outputs": []}', plan_pb2.CompileOptions())
    assert [record.message for record in caplog.records if record.name == "cstorch.job"] == [
        "Job job-1 waits in the queue (2 of 3) for 1 wafer, held by job-a",
        "Job job-1 waits in the queue (1 of 2) for 1 wafer, held by job-b",
        "Job job-1 has its nodes now",
    ]
    (created,) = cluster.created
    assert (created.priority, created.user, created.host) == (1, getpass.getuser(), socket.gethostname())
    job.prepare_input(node_pb2.PrepareInput(loader="train"))
    job.close()
