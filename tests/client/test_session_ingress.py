"""A script that goes through an ingress, behind which management is away, or which goes itself."""

from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
from fake_cluster import Coordinator, FakeCluster

from cstorch._internal.session.job import ClientJob
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ClusterUnreachableError, NodeLostError
from waferbox import deadlines
from wsc.v1 import coordinator_pb2

pytestmark = pytest.mark.services


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(gateway=True)


@pytest.fixture
def server(cluster: FakeCluster) -> Iterator[grpc.Server]:
    server = cluster.serve()
    yield server
    server.stop(None).wait(5)


def test_a_job_is_asked_for_again_while_management_is_away(cluster: FakeCluster, server: grpc.Server) -> None:
    cluster.away = 2
    job = ClientJob(cluster.address, ClusterConfig(), "")
    assert job.name == "job-1"
    job.close()


def test_management_that_stays_away_is_an_error_that_says_so(
    cluster: FakeCluster, server: grpc.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, connect=0.3))
    cluster.away = 1_000_000
    with pytest.raises(ClusterUnreachableError, match="no management service answers the ingress"):
        ClientJob(cluster.address, ClusterConfig(), "")


def test_an_ingress_that_goes_is_named_with_the_job(
    cluster: FakeCluster, server: grpc.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, another=0.5))
    job = ClientJob(cluster.address, ClusterConfig(), "")
    server.stop(None).wait(5)
    failure = job.wait_for_failure()
    assert isinstance(failure, NodeLostError)
    assert f"the connection to the ingress at {cluster.address} broke" in str(failure)
    assert "job-1 ends with it" in str(failure)
    job.close()


def test_a_server_that_cancels_its_calls_since_it_stops_is_no_cancelled_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(
        self: Coordinator, request: coordinator_pb2.SessionRequest, context: grpc.ServicerContext
    ) -> Iterator[coordinator_pb2.SessionResponse]:
        context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")

    monkeypatch.setattr(deadlines, "COORDINATION", replace(deadlines.COORDINATION, another=0.5))
    monkeypatch.setattr(Coordinator, "Session", session)
    cluster = FakeCluster(gateway=True)
    server = cluster.serve()
    job = ClientJob(cluster.address, ClusterConfig(), "")
    assert isinstance(job.wait_for_failure(), NodeLostError)
    job.close()
    server.stop(None).wait(5)
