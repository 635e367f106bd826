"""The fork server of a process that no launcher has started."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nodes.launch.child import Child
from nodes.launch.descriptors import readable
from nodes.launch.own_fork_server import own_fork_server, own_name
from nodes.launch.process import SOCKET_VARIABLE
from nodes.launch.spawn import SpawnError, spawn

pytestmark = pytest.mark.cluster

PROBE = """
import os, signal, sys

def main(argv):
    os.write(3, f"{os.getppid()} {'json' in sys.modules}".encode())
    if argv[1:]:
        signal.signal(signal.SIGTERM, lambda number, frame: os.write(3, b" ended by SIGTERM"))
    if argv:
        signal.pause()
    return 7
"""


@pytest.fixture(autouse=True)
def _started_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher's fork server; the module `swarmx` is the one above."""
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    package = tmp_path / "swarmx"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def server() -> Iterator[psutil.Process]:
    before = set(psutil.Process().children())
    with own_fork_server(["json"]):
        (started,) = set(psutil.Process().children()) - before
        yield started


def start(*arguments: str, outlives: bool = False) -> tuple[Child, str]:
    """A process, and what it says of itself."""
    reader, writer = os.pipe()
    with open(reader) as said:
        child = spawn("swarmx", arguments, [writer], outlives=outlives)
        os.close(writer)
        assert readable([said], 60)
        return child, os.read(reader, 100).decode()


def parent_of_one() -> int:
    child, said = start()
    assert child.wait(60) == 7
    child.close()
    return int(said.split()[0])


def test_what_is_started_has_the_modules_already(server: psutil.Process) -> None:
    child, said = start("stay")
    assert said == f"{server.pid} True"
    assert child.close() == -signal.SIGTERM


def test_another_takes_the_place_of_one_that_died(server: psutil.Process) -> None:
    stays, _ = start("stay")
    server.kill()
    assert stays.wait(10) == -signal.SIGKILL
    assert "the fork server" in stays.cause
    stays.close()
    assert parent_of_one() not in (server.pid, os.getpid())


def test_processes_are_had_whenever_it_dies(server: psutil.Process) -> None:
    name = own_name()
    for _ in range(10):
        parent = parent_of_one()
        assert parent != os.getpid()
        os.kill(parent, signal.SIGKILL)  # and whoever asks now may find it dead, dying or alive
        assert own_name() == name


def test_a_launchers_fork_server_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "of-a-launcher")
    before = psutil.Process().children()
    with own_fork_server(["json"]):
        assert own_name() == ""
        assert psutil.Process().children() == before


def test_a_server_that_cannot_import_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    with own_fork_server(["no_such_module"]), pytest.raises(SpawnError, match="fork server"):
        spawn("swarmx", [])
    assert "no_such_module" in capfd.readouterr().err


def test_what_is_to_outlive_the_process_does_and_the_rest_is_killed() -> None:
    script = """
        import json, os, signal
        from nodes.launch.own_fork_server import own_fork_server
        from nodes.launch.spawn import spawn
        with own_fork_server(["json"]):
            children = [spawn("swarmx", ["stay"], [2], outlives=outlives) for outlives in (True, False)]
            print(json.dumps([child.pid for child in children]), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as asking:
        assert asking.stdout is not None
        outliving, tied = (psutil.Process(pid) for pid in json.loads(asking.stdout.readline()))
        server = outliving.parent()
        assert server is not None
        assert asking.wait(30) == -signal.SIGKILL
    assert psutil.wait_procs([tied], 10)[1] == []
    assert outliving.is_running()
    assert server.is_running()
    os.kill(outliving.pid, signal.SIGTERM)
    assert psutil.wait_procs([outliving, server], 10)[1] == []


def test_those_whom_a_killed_process_leaves_have_no_time_to_end_in_good_order() -> None:
    """A coordinator whose ingress was killed must not tell management that its job was ended on purpose."""
    reader, writer = os.pipe()
    script = f"""
        import os, signal, sys
        from nodes.launch.own_fork_server import own_fork_server
        from nodes.launch.spawn import spawn
        with own_fork_server(["json"]):
            child = spawn("swarmx", ["stay", "say the signal"], [{writer}])
            sys.stdin.read()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[writer]) as asking:
        os.close(writer)
        with open(reader, "rb", buffering=0) as said:
            assert said.read(100).split()[1:] == [b"True"]
            assert asking.stdin is not None
            asking.stdin.close()
            assert asking.wait(30) == -signal.SIGKILL
            assert said.read() == b""


def test_the_fork_server_is_not_waited_for_while_it_is_needed() -> None:
    with own_fork_server(["json"]):
        child, _ = start("stay", outlives=True)
        server = psutil.Process(child.pid).parent()
        assert server is not None
    assert child.poll() is None
    assert child.close() == -signal.SIGTERM
    assert psutil.wait_procs([server], 10)[1] == []
