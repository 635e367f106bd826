"""What the tests of the appliance share: a cluster in this process, and clients of it."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_in_process import Client, ClusterInProcess, ThreadChild, children_by_job, jobs_by_loop

from appliance.coordinator import serving
from appliance.coordinator import settings as coordinator_settings
from appliance.coordinator.job import CoordinatedJob
from appliance.coordinator.processes import HostProcesses
from waferbox.launch.async_child import AsyncChild
from waferbox.rpc import server
from wsc.v1 import (
    management_pb2,
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "make_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.services)


@pytest.fixture(autouse=True, scope="session")
def own_connections() -> Iterator[None]:
    """Gives each channel a connection of its own: what are processes of a cluster are threads of this one.

    Else a coordinator that has just begun would wait, as another's attempt to connect has failed a moment before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "_OPTIONS", [*server._OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
        yield


@pytest.fixture
def make_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], ClusterInProcess]]:
    """A cluster with leases of so many seconds."""
    monkeypatch.setattr(
        coordinator_settings, "spawn", lambda module, argv, fds, outlives, end_signal: ThreadChild(os.dup(fds[0]))
    )

    # What a management service finds that follows another one.
    def find(self: HostProcesses, hello: management_pb2.CoordinatorHello) -> AsyncChild | None:
        child = None if hello.ingress else children_by_job.get(hello.job)
        return None if child is None else AsyncChild(child)  # type: ignore[arg-type]

    monkeypatch.setattr(HostProcesses, "find", find)

    def make_job(*arguments: Any, **options: Any) -> CoordinatedJob:
        job = jobs_by_loop[asyncio.get_running_loop()] = CoordinatedJob(*arguments, **options)
        return job

    monkeypatch.setattr(serving, "CoordinatedJob", make_job)
    made: list[ClusterInProcess] = []

    def make(lease_seconds: float) -> ClusterInProcess:
        made.append(ClusterInProcess(tmp_path / "cache", lease_seconds))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def cluster(make_cluster: Callable[[float], ClusterInProcess]) -> ClusterInProcess:
    return make_cluster(5.0)


@pytest.fixture
def client(cluster: ClusterInProcess) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(**settings: Any) -> Client:
        clients.append(Client(cluster, **settings))
        return clients[-1]

    yield make
    for one in clients:
        one.close()
