"""The command `waferbox` and the embedded launcher, with real processes."""

import contextlib
import functools
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from cluster_rig import Surroundings, wait_for
from role_server import RoleServer
from up_rig import COMMAND, Forked, forked_waferbox

pytestmark = pytest.mark.cluster

EMBEDDED = "waferbox.cluster.embedded"
Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]  # see the fixture forked

SCRIPT = """
import json, os, signal, sys, time
try:
    print(json.dumps([sys.argv[1:], os.environ["WAFERBOX_MANAGEMENT"]]), flush=True)
    if "wait" in sys.argv:
        time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.3)  # a second one would interrupt this
    sys.exit(9)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def role_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleServer]:
    with contextlib.closing(RoleServer(tmp_path_factory.mktemp("role_server"))) as server:
        yield server


@pytest.fixture
def surroundings(tmp_path: Path) -> Iterator[Surroundings]:
    """No process, no socket in the file system, no shared memory, no note of a cluster is left."""
    surroundings = Surroundings(tmp_path / "surroundings", tmp_path / "cache")
    shared = set(os.listdir("/dev/shm"))
    yield surroundings
    wait_for(lambda: not surroundings.processes(), 10.0, lambda: f"still there: {surroundings.processes()}")
    assert set(os.listdir("/dev/shm")) <= shared
    assert not list(tmp_path.rglob("*.sock"))
    assert not (tmp_path / "waferbox").exists()


@pytest.fixture
def environment(surroundings: Surroundings, tmp_path: Path) -> dict[str, str]:
    """No other cluster of this user is to be found."""
    return surroundings.variables(XDG_RUNTIME_DIR=str(tmp_path), COLUMNS="200")


@pytest.fixture(scope="module")
def forked(role_server: RoleServer) -> Run:
    """forked(environment, *arguments): `waferbox` in a process that is forked, once it has ended."""
    return functools.partial(forked_waferbox, role_server)


def waferbox(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`waferbox` as a user's."""
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["up", "--wafers", "0"], "--wafers"),
        (["up", "--wafers", "many"], "--wafers"),
        (["up", "--listen", "somewhere"], "host:port"),
        (["run"], "SCRIPT"),
        (["run", "/nonexistent/train.py"], "there is no script /nonexistent/train.py"),
        (["status", "--management", "localhost"], "host:port"),
        (["status", "--management", "127.0.0.1:0"], "host:port"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_wrong_arguments_are_said_to_be_wrong(
    environment: dict[str, str], forked: Run, arguments: list[str], text: str
) -> None:
    done = forked(environment, *arguments)
    assert done.returncode == 2
    assert text in re.sub(r"\s*│\s*", " ", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["status", "down"])
def test_no_cluster_is_a_clear_error(environment: dict[str, str], forked: Run, command: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        done = forked(environment, command, "--management", address)
    assert done.returncode == 1
    assert address in done.stderr
    assert "Traceback" not in done.stderr
    done = forked(environment, command)
    assert done.returncode == 1
    assert "waferbox up" in done.stderr


def test_the_version_is_shown(environment: dict[str, str]) -> None:
    from waferbox import __version__

    assert __version__ in waferbox(environment, "--version").stdout


@pytest.fixture
def taken_page() -> Iterator[None]:
    """The usual port of a page, which another process may use already."""
    with contextlib.ExitStack() as closing:
        with contextlib.suppress(OSError):
            closing.enter_context(socket.create_server(("127.0.0.1", 9080)))
        yield


@pytest.mark.usefixtures("taken_page")
def test_up_in_the_background_status_and_down(environment: dict[str, str], forked: Run, tmp_path: Path) -> None:
    """The page is at the next free port, though that of management is given."""
    options = ["--wafers", "2", "--memoryx", "2", "--listen", "127.0.0.1:0", "--page", "--background"]
    done = waferbox(environment, "up", *options)
    assert done.returncode == 0, done.stderr
    found = re.search(r"export WAFERBOX_MANAGEMENT=(\S+)", done.stdout)
    assert found is not None
    page = re.search(r"To look at it: +(http://127\.0\.0\.1:\d+/)", done.stdout)
    assert page is not None
    with urllib.request.urlopen(page[1], timeout=20) as answer:
        assert "No job runs." in answer.read().decode()
    shown = waferbox(environment, "status")
    assert shown.returncode == 0
    assert found[1] in shown.stdout
    rows = [line.split() for line in shown.stdout.splitlines() if re.match(r"n\d+ ", line)]
    assert sorted(row[1] for row in rows) == ["memoryx"] * 2 + ["swarmx"] + ["wafer"] * 2 + ["worker"] * 2
    assert all(row[2] == "free" for row in rows)
    again = forked({**environment, "WAFERBOX_MANAGEMENT": found[1]}, "status")
    assert again.returncode == 0
    begin = time.monotonic()
    # The record of the cluster names its secret, whatever a later command has in its environment.
    # A cluster that is found by its record is this account's, whatever a shell has set for others.
    other = {"WAFERBOX_SECRET_FILE": str(tmp_path / "absent"), "WAFERBOX_TOKEN": "user:ada:00"}
    down = waferbox({**environment, **other}, "down")
    assert down.returncode == 0, down.stderr
    assert time.monotonic() - begin < 20
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_stays_until_it_is_told_to_end(
    environment: dict[str, str], role_server: RoleServer, number: signal.Signals
) -> None:
    with Forked(role_server, environment, "waferbox", "up") as up:
        for line in up.stdout:
            if "export" in line:
                break
        up.send_signal(number)
        begin = time.monotonic()
        messages = up.stderr.read()
        assert up.wait(20) == 0
        assert time.monotonic() - begin < 5
    assert "Traceback" not in messages
    assert "WARNING" not in messages


def test_up_starts_a_node_that_dies_again_and_ends_with_down(
    environment: dict[str, str], role_server: RoleServer, forked: Run
) -> None:
    with Forked(role_server, environment, "waferbox", "up") as up:
        pid = 0
        for line in up.stdout:
            if line.startswith("wafer "):
                pid = int(line.split()[2])
            if "export" in line:
                break
        assert pid, up.stderr.read()  # the number 0 would name this process's group
        os.kill(pid, signal.SIGKILL)
        told = next(line for line in up.stderr if "starting the cluster" not in line)  # which may have been slow
        assert f"wafer (pid {pid}) ended with status -9; started again as pid " in told
        deadline = time.monotonic() + 60
        while told.split()[-1] not in forked(environment, "get", "nodes", "-o", "wide").stdout.split():
            assert time.monotonic() < deadline
        assert forked(environment, "down").returncode == 0
        assert up.wait(20) == 0


def test_an_address_that_is_taken_is_a_clear_error(environment: dict[str, str], forked: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for extra in ([], ["--background"]):
            done = forked(environment, "up", "--listen", address, *extra)
            assert done.returncode == 1
            assert f"cannot listen at {address}" in done.stderr
            assert "Traceback" not in done.stderr


def test_output_that_cannot_be_written_is_no_traceback(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "waferbox", "--version"]
    for redirection, text in (("> /dev/full", "cannot be written: No space left on device"), (">&-", "")):
        done = subprocess.run(
            ["sh", "-c", f"{shlex.join(command)} {redirection}"], env=environment, stderr=subprocess.PIPE, text=True
        )
        assert text in done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
        assert bool(text) == bool(done.returncode)


def test_run_gives_the_script_a_cluster_and_exits_as_it_does(
    environment: dict[str, str], forked: Run, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    states = ["--state-dir", str(tmp_path), "--memory-limit", "8g"]  # MemoryX takes them, or would not start
    done = forked(environment, "run", "--wafers", "1", *states, str(script), "--wafers", "3", "-v")
    assert done.returncode == 7, done.stderr
    arguments, address = json.loads(done.stdout)
    assert arguments == ["--wafers", "3", "-v"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)


@pytest.mark.parametrize("kind", ["folder", "standard input"])
def test_run_takes_what_python_takes(environment: dict[str, str], tmp_path: Path, kind: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(SCRIPT)
    command = [sys.executable, *COMMAND[1:], "run", str(package) if kind == "folder" else "-", "--lr", "1"]
    done = subprocess.run(command, env=environment, input=SCRIPT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout)[0] == ["--lr", "1"]


def test_run_starts_a_script_again_that_died(environment: dict[str, str], forked: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "number = int(os.environ['WAFERBOX_RESTART'])\n"
        "print(number, flush=True)\n"
        "if number == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit({1: 3, 2: 0}[number])\n"
    )
    done = forked(environment, "run", "--restarts", "2", str(script))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["0", "1", "2"]
    assert "ended with status 137: starting it again (1 of 2)" in done.stderr
    done = forked(environment, "run", "--restarts", "1", str(script))
    assert done.returncode == 3


def test_a_folder_for_states_that_lies_in_memory_is_refused(
    environment: dict[str, str], forked: Run, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    states = ["--state-dir", "/dev/shm", "--memory-limit", "8g"]
    done = forked(environment, "run", *states, str(script))
    assert done.returncode == 1
    assert "--state-dir must be a folder on a disk" in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 9), (signal.SIGTERM, 128 + 15)])
def test_run_passes_signals_on(
    environment: dict[str, str], role_server: RoleServer, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Forked(role_server, environment, "waferbox", "run", str(script), "wait") as run:
        assert run.stdout.readline()
        run.send_signal(number)
        assert run.wait(20) == status


@pytest.mark.parametrize("way", ["its input ends", "SIGTERM", "kill -9"])
def test_the_embedded_cluster_ends_with_whoever_holds_it(
    environment: dict[str, str], role_server: RoleServer, forked: Run, way: str
) -> None:
    with Forked(role_server, environment, EMBEDDED, "--wafers", "1") as embedded:
        address = json.loads(embedded.stdout.readline())["management"]
        assert forked(environment, "status", "--management", address).returncode == 0
        begin = time.monotonic()
        if way == "its input ends":
            embedded.end_input()
        else:
            embedded.send_signal(signal.SIGTERM if way == "SIGTERM" else signal.SIGKILL)
        status = embedded.wait(20)
        assert status == (-signal.SIGKILL if way == "kill -9" else 0)
        assert time.monotonic() - begin < 5
        assert embedded.stdout.read() == ""  # nobody holds it any more
    assert "No clusters." in forked(environment, "get", "clusters").stderr  # the record of one that was killed goes


def test_ctrl_c_on_the_terminal_reaches_the_script_once(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.replace("sys.exit(9)", "time.sleep(0.3); sys.exit(9)")
    )  # a second one would interrupt this
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*COMMAND, "run", str(script), "wait"], environment)
    shown = b""
    while b'["wait"]' not in shown:
        shown += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # the terminal's end, when the last of its processes has gone
        while os.read(terminal, 1000):
            pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
