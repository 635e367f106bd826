"""The help of the command says what it takes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from waferbox.commands import cluster_commands
from waferbox.commands.cli import app
from waferbox.launch.local_clusters import ClusterError


@pytest.mark.parametrize("command", [["up"], ["logs"], ["opt"], ["compile-report"]])
def test_a_flag_is_not_shown_with_a_value(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    shown = CliRunner().invoke(app, [*command, "--help"])
    assert shown.exit_code == 0, shown.output
    assert [line for line in shown.output.splitlines() if "bool>" in line and "--help" not in line] == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--memory-limit", "8g"], "needs --state-dir"),
        (["--memory-limit", "plenty", "--state-dir", "."], "such as 512m or 8g"),
        (["--state-dir", "/nowhere"], "does not exist"),
    ],
)
def test_what_memoryx_could_not_use_is_refused_at_once(
    options: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for command in (["up"], ["run", __file__]):
        refused = CliRunner().invoke(app, [command[0], *options, *command[1:]])
        assert refused.exit_code == 2
        assert reason in refused.output


@pytest.mark.parametrize("option", ["--wafers", "--memoryx", "--workers", "--swarmx"])
@pytest.mark.parametrize("number", ["1025", "99999999999999999999"])
def test_more_processes_than_a_machine_runs_are_refused(
    option: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(cluster_commands, "start_embedded", _not_to_be_called)
    monkeypatch.setattr(cluster_commands, "Cluster", _not_to_be_called)
    for command in (["up"], ["run", __file__]):
        refused = CliRunner().invoke(app, [command[0], option, number, *command[1:]])
        assert refused.exit_code == 2
        assert f"'{option}': Input should be less than or equal to 1024" in refused.output


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("file", "it is a file"), ("file/below", "Not a directory"), ("/proc/none", "No such file"), ("/proc", "")],
)
def test_a_cache_that_cannot_be_written_is_refused(
    folder: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(cluster_commands, "start_embedded", _not_to_be_called)
    monkeypatch.setattr(cluster_commands, "Cluster", _not_to_be_called)
    for command in (["up"], ["run", __file__]):
        refused = CliRunner().invoke(app, [command[0], "--cache-root", folder, *command[1:]])
        assert refused.exit_code == 2
        assert f"--cache-root: {folder} must be a folder that can be written: {reason}" in refused.output


def test_a_cache_that_does_not_exist_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cluster(*arguments: object) -> None:
        raise ClusterError("no cluster in this test")

    monkeypatch.setattr(cluster_commands, "start_embedded", no_cluster)
    folder = tmp_path / "new" / "cache"
    done = CliRunner().invoke(app, ["run", "--cache-root", str(folder), __file__])
    assert "no cluster in this test" in done.output
    assert list(folder.iterdir()) == []


def _not_to_be_called(*arguments: object, **options: object) -> None:
    pytest.fail("a cluster would have started")
