"""What commands show while they take long."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Never

import pytest
from fake_management import FakeManagement, job
from rich.console import Console
from test_plan_command import step as step
from typer.testing import CliRunner, Result

from waferbox.commands import cluster_commands, connection
from waferbox.commands.cli import app
from waferbox.host.slow_work import INTERVALS
from waferbox.launch.local_clusters import ClusterStopped
from waferbox.output import working as working_module
from waferbox.output.working import working
from wsc.v1 import management_pb2


@contextmanager
def each_is_slow(report: Callable[[], None], intervals: Sequence[float] = INTERVALS) -> Iterator[None]:
    """As `reported`, for work that takes just two seconds, without the time."""
    yield
    report()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_module, "reported", each_is_slow)


@pytest.fixture
def management(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeManagement]:
    monkeypatch.setattr(FakeManagement, "Shutdown", lambda *call: management_pb2.ShutdownResponse())
    fake = FakeManagement()
    server = fake.serve()
    fake.jobs = [job("job-1a2b3c4d", "QUEUED", queue_position=1)]
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", fake.address)
    yield fake
    fake.over.set()
    server.stop(None).wait(5.0)


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result


def test_fast_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with working("starting the cluster"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("slow")
def test_plain_lines_are_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with working("reading [the] step") as work:
        work.now("compiling\x1b the step")
        work.at("layer 1 of 2")
        work.at("layer 2 of 2")
        work.now("predicting the step")
    lines = ["reading [the] step ...", "compiling\\x1b the step: layer 2 of 2 ...", "predicting the step ..."]
    assert capsys.readouterr() == ("", "".join(f"waferbox: {line}\n" for line in lines))


def test_a_line_is_not_repeated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def twice(report: Callable[[], None], intervals: Sequence[float]) -> Iterator[None]:
        yield
        report()
        report()

    monkeypatch.setattr(working_module, "reported", twice)
    with working("starting the cluster"):
        pass
    assert capsys.readouterr().err == "waferbox: starting the cluster ...\n"


def test_a_terminal_gets_a_status_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, standard_output = io.StringIO(), sys.stdout
    terminal = Console(file=screen, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    monkeypatch.setattr(working_module, "errors", terminal)
    reporters: list[Callable[[], None]] = []

    @contextmanager
    def kept(report: Callable[[], None], intervals: Sequence[float]) -> Iterator[None]:
        assert intervals[0] < 1
        reporters.append(report)
        yield

    monkeypatch.setattr(working_module, "reported", kept)
    with working("compiling [the] step") as work:
        assert not screen.getvalue()
        reporters[-1]()
        work.at("layer 2 of 2")
        reporters[-1]()  # no second status
        assert sys.stdout is standard_output  # it may be a pipe, with results
    assert "compiling [the] step: layer 2 of 2 ..." in screen.getvalue()  # the last refresh
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # the line is erased


@pytest.mark.usefixtures("slow")
def test_plan(step: Path) -> None:
    result = call("plan", str(step), "--wafers", "1,1024", "--json")
    lines = result.stderr.splitlines()
    assert lines[0] == "waferbox: loading the compiler ..."
    assert lines[-2].startswith("waferbox: compiling the step")
    assert lines[-1].startswith("waferbox: predicting the step: 1,024 wafers, fan-out ")
    assert len(json.loads(result.stdout)["predictions"]) == 2


@pytest.mark.usefixtures("slow", "management")
@pytest.mark.parametrize(
    "arguments",
    [
        ("get", "jobs", "-o", "json"),
        ("get", "nodes"),
        ("get", "cluster"),
        ("status",),
        ("describe", "job", "1a2"),
        ("logs", "1a2"),
        ("top", "1a2"),
        ("cancel", "1a2"),
        ("label", "1a2", "a=b"),
        ("set-priority", "1a2", "1"),
    ],
)
def test_commands_that_ask_the_cluster(arguments: tuple[str, ...]) -> None:
    result = call(*arguments)
    assert "waferbox: waiting for the cluster at 127.0.0.1:" in result.stderr
    assert "waiting for the cluster" not in result.stdout


@pytest.mark.usefixtures("slow")
def test_down_waits_for_the_end(management: FakeManagement, monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(wait=lambda seconds: True, pid=1, secret="")
    monkeypatch.setattr(connection, "find_cluster", lambda *arguments: (management.address, own))
    result = call("down")
    assert result.stderr == "waferbox: ending the cluster ...\n"
    assert result.stdout == f"The cluster at {management.address} is down.\n"


@pytest.mark.usefixtures("slow")
def test_run_starts_and_ends_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster_commands, "start_embedded", lambda *arguments: (None, "127.0.0.1:9000", "", ""))
    monkeypatch.setattr(cluster_commands, "stop_embedded", lambda process: None)
    monkeypatch.setattr(cluster_commands, "run_script", lambda command, variables: 0)
    script = tmp_path / "script.py"
    script.touch()
    assert call("run", str(script)).stderr == "waferbox: starting the cluster ...\nwaferbox: ending the cluster ...\n"


def test_a_script_is_not_started_again_without_its_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = SimpleNamespace(poll=lambda: -9)
    monkeypatch.setattr(cluster_commands, "start_embedded", lambda *arguments: (ended, "127.0.0.1:9000", "", ""))
    monkeypatch.setattr(cluster_commands, "stop_embedded", lambda process: None)
    runs: list[object] = []

    def fails(command: object, variables: object) -> int:
        runs.append(command)
        return 1

    monkeypatch.setattr(cluster_commands, "run_script", fails)
    script = tmp_path / "script.py"
    script.touch()
    result = CliRunner().invoke(app, ["run", "--restarts", "3", str(script)])
    assert (result.exit_code, len(runs)) == (1, 1)
    assert "is not started again: its cluster has ended" in " ".join(result.stderr.split())


@pytest.mark.usefixtures("slow")
def test_opt_and_its_result_on_standard_output(step: Path) -> None:
    result = call("opt", str(step), "--pass", "canonicalise")
    assert result.stderr.splitlines()[-1].startswith("waferbox: running the passes")
    assert "func @graph" in result.stdout


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_up_that_is_stopped_while_it_starts_has_the_status_of_the_signal(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    def start(*arguments: object) -> Never:
        os.kill(os.getpid(), number)
        raise ClusterStopped

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(cluster_commands, "ForkingLauncher", lambda: None)
    monkeypatch.setattr(cluster_commands, "Cluster", start)
    try:
        done = CliRunner().invoke(app, ["up"])
    finally:
        signal.set_wakeup_fd(-1)
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert done.exit_code == status
    assert "the cluster was stopped while it started" in done.output
