"""What the checks of a process share: a server that forks their scripts, and the cluster on which these run.

The command starts a Python and a cluster for each run, which takes longer than what the scripts of these tests do.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from forking_server import ForkedProcess
from script_server import ScriptServer

from cstorch._internal.session.embedded import EmbeddedCluster
from cstorch.distributed import ClusterConfig
from waferbox import settings
from waferbox.check import runs


@pytest.fixture(scope="session")
def script_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    with closing(ScriptServer(tmp_path_factory.mktemp("script_server"))) as server:
        yield server


@pytest.fixture(scope="session")
def management(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster like the one that a checked script has for itself."""
    cluster = EmbeddedCluster(ClusterConfig(max_wgt_servers=1), tmp_path_factory.mktemp("cluster") / "log")
    yield cluster.management()
    cluster.stop()


@pytest.fixture
def forked_scripts(script_server: ScriptServer, management: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the scripts of checks forked, and run on the shared cluster."""

    def start(command: Sequence[str], environment: Mapping[str, str], log: int) -> ForkedProcess:
        _, script, *arguments = command
        variables = {**environment, settings.MANAGEMENT.name: management}
        return script_server.start(Path(script), arguments, Path.cwd(), variables, [log, log])

    monkeypatch.setattr(runs, "start_script", start)
