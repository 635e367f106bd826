"""The fork server of a process that no launcher has started."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import psutil
import pytest
from probe import run

from waferbox import settings
from waferbox.launch.fork_server_process import own_fork_server, own_fork_server_name
from waferbox.launch.spawn import SpawnError, spawn

pytestmark = pytest.mark.cluster

PRELOAD = ["colorsys"]  # which nobody imports otherwise


@pytest.fixture(autouse=True)
def _started_by_hand(probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher's fork server."""
    monkeypatch.delenv(settings.FORK_SERVER.name, raising=False)


@pytest.fixture
def server() -> Iterator[psutil.Process]:
    before = set(psutil.Process().children())
    with own_fork_server(PRELOAD):
        (started,) = set(psutil.Process().children()) - before
        yield started


def parent_of_one() -> int:
    while True:
        child, (end,) = run(["report"])
        with end:
            answer = end.recv(10000)
        status = child.wait(60)
        child.close()
        if answer:
            assert status == 0
            parent: int = json.loads(answer)["parent"]
            return parent
        assert status == -signal.SIGKILL  # a dying server forked it


def test_what_is_started_has_the_modules_already(server: psutil.Process) -> None:
    child, (end,) = run(["report"])
    with end:
        answer = json.loads(end.recv(10000))
    assert (answer["parent"], answer["preloaded"]) == (server.pid, True)
    assert child.wait(60) == 0
    child.close()


def test_another_takes_the_place_of_one_that_died(server: psutil.Process) -> None:
    stays, (end,) = run(["stay"])
    with end:
        assert end.recv(100) == b"here"
    server.kill()
    assert stays.wait(10) == -signal.SIGKILL
    assert "the fork server" in stays.cause
    stays.close()
    assert parent_of_one() not in (server.pid, os.getpid())


def test_processes_are_had_whenever_it_dies(server: psutil.Process) -> None:
    name = own_fork_server_name()
    for _ in range(10):
        parent = parent_of_one()
        assert parent != os.getpid()
        os.kill(parent, signal.SIGKILL)  # and whoever asks now may find it dead, dying or alive
        assert own_fork_server_name() == name


def test_a_launchers_fork_server_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.FORK_SERVER.name, "of-a-launcher")
    before = psutil.Process().children()
    with own_fork_server(PRELOAD):
        assert own_fork_server_name() == ""
        assert psutil.Process().children() == before


def test_a_server_that_cannot_import_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    with own_fork_server(["no_such_module"]), pytest.raises(SpawnError, match="fork server"):
        spawn("swarmx", [])
    assert "no_such_module" in capfd.readouterr().err


def test_what_is_to_outlive_the_process_does_and_the_rest_is_killed() -> None:
    script = """
        import json, os, signal, sys
        from waferbox.launch.fork_server_process import own_fork_server
        from waferbox.launch.spawn import spawn
        with own_fork_server([]):
            children = [spawn("swarmx", ["stay"], [2], outlives=outlives) for outlives in (True, False)]
            print(json.dumps([child.pid for child in children]), flush=True)
            sys.stdin.read()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None
        outliving, tied = (psutil.Process(pid) for pid in json.loads(asking.stdout.readline()))
        server = outliving.parent()
        assert server is not None
        asking.stdin.close()
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
        from waferbox.launch.fork_server_process import own_fork_server
        from waferbox.launch.spawn import spawn
        with own_fork_server([]):
            child = spawn("swarmx", ["telling"], [{writer}])
            sys.stdin.read()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[writer]) as asking:
        os.close(writer)
        with open(reader, "rb", buffering=0) as said:
            assert said.read(100) == b"here"
            assert asking.stdin is not None
            asking.stdin.close()
            assert asking.wait(30) == -signal.SIGKILL
            assert said.read() == b""


def test_the_fork_server_is_not_waited_for_while_it_is_needed() -> None:
    with own_fork_server(PRELOAD):
        child, (end,) = run(["stay"], outlives=True)
        with end:
            assert end.recv(100) == b"here"
        server = psutil.Process(child.pid).parent()
        assert server is not None
    assert child.poll() is None
    assert child.close() == -signal.SIGTERM
    assert psutil.wait_procs([server], 10)[1] == []
