"""A cluster that cannot run a job of all its wafers."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from waferbox.commands import cluster_commands
from waferbox.commands.cli import app
from waferbox.launch.local_clusters import ClusterError


@pytest.mark.parametrize("command", [["up", "--background"], ["run", __file__]])
@pytest.mark.parametrize(("workers", "is_warned"), [(2, True), (4, False)])
def test_too_few_workers_for_a_job_of_all_wafers_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str], workers: int, is_warned: bool
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise ClusterError("no cluster is started here")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(cluster_commands, "start_embedded", refuse)
    name, *rest = command
    done = CliRunner().invoke(app, [name, "--wafers", "4", "--workers", str(workers), *rest])
    assert "no cluster is started here" in done.stderr
    assert ("at most 2 wafers of the 4. For jobs of all: --workers 4" in done.stderr) == is_warned
