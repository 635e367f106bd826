"""What the tests of the client share: a cluster that is a fake."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from fake_cluster import FakeCluster, StartCluster, Step
from halved_weight import halve

from cstorch.backend import close_backend


@pytest.fixture
def start_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartCluster]:
    """start_cluster(step): a fake one that computes each step so, and that the client takes for a real one."""
    with ExitStack() as stack:

        def start(step: Step) -> FakeCluster:
            cluster = FakeCluster(step=step)
            server = cluster.serve()
            stack.callback(lambda: server.stop(None).wait(5))
            stack.callback(close_backend)
            cluster.connect_client(monkeypatch)
            return cluster

        yield start


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    """One whose step is that of halved_weight.py, where a test asks for no other."""
    return start_cluster(halve)
