"""A cluster for each process that runs tests, and scripts on it."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import count
from pathlib import Path

import pytest
from cluster_rig import (
    SCRIPTS,
    RunningCluster,
    RunningScript,
    StartCluster,
    StartScript,
    Surroundings,
    running_cluster,
)
from role_server import RoleServer
from script_server import ScriptServer

sys.path.insert(0, str(SCRIPTS))  # for workers too, which import the functions that make input


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiler's artifacts, for all clusters of this process."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def role_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleServer]:
    with closing(RoleServer(tmp_path_factory.mktemp("role_server"))) as server:
        yield server


@pytest.fixture(scope="session")
def start_cluster(cache: Path, role_server: RoleServer) -> StartCluster:
    """start_cluster(folder, *options, variables=None, **roles), as running_cluster."""

    def start(
        folder: Path, *options: str, variables: dict[str, str] | None = None, **roles: int
    ) -> AbstractContextManager[RunningCluster]:
        return running_cluster(folder, cache, *options, server=role_server, variables=variables, **roles)

    return start


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, start_cluster: StartCluster) -> Iterator[RunningCluster]:
    """A cluster of 4 wafers with 2 workers each, and 2 MemoryX shards. A test must not kill its processes."""
    folder = tmp_path_factory.mktemp("cluster") / "own"
    with start_cluster(folder, wafers=4, memoryx=2, workers=8) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def script_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    with closing(ScriptServer(tmp_path_factory.mktemp("script_server"))) as server:
        yield server


@pytest.fixture
def start_script(tmp_path: Path, cache: Path, script_server: ScriptServer) -> Iterator[StartScript]:
    """start_script(path, *arguments, management=None | address, prefix=(), fresh=False, **variables).

    fresh: as a Python of its own, as a user's. Nothing may be left.
    """
    numbers = count()
    with ExitStack() as stack:

        def start(
            script: Path,
            *arguments: object,
            management: str | None,
            prefix: Sequence[str] = (),
            fresh: bool = False,
            python: str = sys.executable,
            **variables: str,
        ) -> RunningScript:
            surroundings = Surroundings(tmp_path / f"script{next(numbers)}", cache)
            server = None if fresh or prefix else script_server
            started = RunningScript(surroundings, script, arguments, management, variables, prefix, server, python)
            stack.callback(surroundings.assert_nothing_left)
            stack.callback(started.close)
            return started

        yield start
