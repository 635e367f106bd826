"""Ray clusters for tests, on one host or on several, and what the embedded cluster gives."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # for cluster_rig

from cluster_rig import RunningCluster, Surroundings, hosts_or_skip, running_cluster

from benchmarks.network import Host


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    folder = tmp_path_factory.mktemp("hosts")
    made = Surroundings(folder / "ray", folder / "cache")
    yield made
    made.assert_nothing_left()


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[list[Host]]:
    with hosts_or_skip(3, "1gbit") as made:
        yield made


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A cluster on one host, without Ray."""
    folder = tmp_path_factory.mktemp("embedded")
    with running_cluster(folder / "cluster", folder / "cache", wafers=2) as cluster:
        yield cluster
