"""The fork server and the plain way of starting a process: descriptors, exit status, ownership."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from probe import gone, run

from waferbox import settings
from waferbox.host.descriptors import readable
from waferbox.launch import spawn as spawning
from waferbox.launch.fork_server_process import ForkServerProcess
from waferbox.launch.spawn import Child, SpawnError, is_running, process_started, spawn

pytestmark = pytest.mark.cluster


@pytest.fixture(params=["forked", "python"])
def way(request: pytest.FixtureRequest, probe: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "python":
        monkeypatch.delenv(settings.FORK_SERVER.name, raising=False)
        yield request.param
        return
    server = ForkServerProcess(["json"], os.environ)
    monkeypatch.setenv(settings.FORK_SERVER.name, server.name)
    yield request.param
    assert readable([server.ready_fileno()], 60)  # before that it would be killed
    server.close()
    assert server.poll() == 0


def test_a_process_has_its_descriptors_and_nothing_else(way: str) -> None:
    child, (end,) = run(["report", "x y"])
    answer = json.loads(end.recv(10000))
    assert child.wait(10) == 0
    assert answer["pid"] == answer["session"] == child.pid
    assert answer["argv"] == ["report", "x y"]
    assert answer["stdin"] == ""
    assert [fd for fd in answer["fds"] if fd > 3] in ([], [answer["fds"][-1]])  # listdir's own
    child.close()
    end.close()


def test_descriptors_keep_their_order(way: str) -> None:
    child, (first, second) = run(["second"], ends=2)
    assert (first.recv(100), second.recv(100)) == (b"first", b"second")
    assert child.wait(10) == 0
    child.close()
    for end in (first, second):
        end.close()


@pytest.mark.parametrize(("arguments", "status"), [(["status", "0"], 0), (["status", "7"], 7), (["raise"], 1)])
def test_the_exit_status_arrives(way: str, arguments: list[str], status: int) -> None:
    child, (end,) = run(arguments)
    assert child.wait(20) == status
    assert child.poll() == status
    child.close()
    end.close()


def test_close_ends_a_process(way: str) -> None:
    child, (end,) = run(["stay"])
    assert end.recv(100) == b"here"
    assert child.poll() is None
    with pytest.raises(TimeoutError):
        child.wait(0.05)
    assert child.close() == -signal.SIGTERM
    assert gone(child.pid)
    end.close()


def test_close_kills_a_process_that_will_not_end(way: str) -> None:
    child, (end,) = run(["stubborn"])
    assert end.recv(100) == b"here"
    assert child.close(deadline_seconds=0.2) == -signal.SIGKILL
    end.close()


def test_only_listed_modules_are_started(way: str) -> None:
    with pytest.raises(ValueError, match="may be started"):
        spawn("http.server", [])


def test_a_process_dies_with_the_one_that_asked_for_it(way: str) -> None:
    script = """
        import os, signal, socket, sys
        from waferbox.launch.spawn import spawn
        ours, theirs = socket.socketpair()
        child = spawn("swarmx", ["stay"], [theirs.fileno()])
        ours.recv(100)
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, timeout=30
    )
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout))


def test_a_process_can_outlive_the_one_that_asked_for_it(way: str) -> None:
    script = """
        import os, signal, socket, sys
        from waferbox.launch.spawn import spawn
        ours, theirs = socket.socketpair()
        child = spawn("swarmx", ["stay"], [theirs.fileno()], outlives=True)
        ours.recv(100)
        print(child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        outliving = int(asking.stdout.readline())
        assert asking.wait(30) == -signal.SIGKILL
    time.sleep(0.1)  # in which a process that is tied to the other's life would be gone
    os.kill(outliving, signal.SIGTERM)
    assert gone(outliving)


def test_everything_dies_with_the_fork_server(probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServerProcess([], os.environ)
    monkeypatch.setenv(settings.FORK_SERVER.name, server.name)
    child, (end,) = run(["stubborn"])
    assert end.recv(100) == b"here"
    os.kill(server.pid, signal.SIGKILL)
    assert child.wait(10) == -signal.SIGKILL
    assert gone(child.pid)
    with pytest.raises(SpawnError, match="fork server"):
        run(["stay"])
    child.close()
    end.close()
    server.close()


def test_the_fork_server_outlives_children_that_are_ended_as_soon_as_they_are_there(
    probe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ForkServerProcess([], os.environ)
    monkeypatch.setenv(settings.FORK_SERVER.name, server.name)
    for _ in range(20):
        child, (end,) = run(["stay"])
        assert child.close() == -signal.SIGTERM
        end.close()
    assert server.poll() is None
    server.close()


def test_closing_the_fork_server_ends_all_within_its_deadline(probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServerProcess([], os.environ)
    monkeypatch.setenv(settings.FORK_SERVER.name, server.name)
    children = [run([kind]) for kind in ("stay", "stubborn")]
    for _, (end,) in children:
        assert end.recv(100) == b"here"
    started = time.monotonic()
    server.close()
    assert time.monotonic() - started < 6
    assert [child.wait(1) for child, _ in children] == [-signal.SIGTERM, -signal.SIGKILL]
    for child, (end,) in children:
        assert gone(child.pid)
        child.close()
        end.close()


def test_a_preloaded_module_that_imports_grpc_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ForkServerProcess(["wsc.v1.node_pb2_grpc"], os.environ)
    monkeypatch.setenv(settings.FORK_SERVER.name, server.name)
    with pytest.raises(SpawnError):
        spawn("swarmx", [])
    server.close()
    assert "imports grpc" in capfd.readouterr().err


@pytest.mark.parametrize("message", [b"", b"{", b"[]", b'{"module": "os", "argv": []}', b'{"module": "swarmx"}'])
def test_the_fork_server_survives_foreign_messages(
    probe: None, monkeypatch: pytest.MonkeyPatch, message: bytes
) -> None:
    server = ForkServerProcess([], os.environ)
    monkeypatch.setenv(settings.FORK_SERVER.name, server.name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(f"\0{server.name}")
        channel.send(message)
        channel.settimeout(10)
        answer = channel.recv(1000)
        assert b'"pid"' not in answer
    child, (end,) = run(["status", "3"])
    assert child.wait(20) == 3
    child.close()
    end.close()
    server.close()


@pytest.fixture
def server(probe: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServerProcess]:
    server = ForkServerProcess([], os.environ)
    monkeypatch.setenv(settings.FORK_SERVER.name, server.name)
    yield server
    server.close()


def test_the_exit_status_is_known_while_the_fork_server_is_suspended(server: ForkServerProcess) -> None:
    ends, (end,) = run(["stay"])
    stays, (other_end,) = run(["stay"])
    assert (end.recv(100), other_end.recv(100)) == (b"here", b"here")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        ends.kill()
        assert ends.wait(10) == -signal.SIGKILL
        assert ends.close() == -signal.SIGKILL
        assert stays.close() == -signal.SIGTERM
    finally:
        os.kill(server.pid, signal.SIGCONT)
    for one in (end, other_end):
        one.close()


def test_a_fork_server_that_is_terminated_kills_what_it_forked(server: ForkServerProcess) -> None:
    child, (end,) = run(["stay"])
    assert end.recv(100) == b"here"
    os.kill(server.pid, signal.SIGTERM)
    assert child.wait(10) == -signal.SIGKILL
    assert readable([server], 10.0)
    child.close()
    end.close()


def test_a_suspended_fork_server_is_ended_with_all_that_it_forked(
    server: ForkServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, (end,) = run(["stay"])
    assert end.recv(100) == b"here"
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    assert (server.poll(), child.wait(10)) == (0, -signal.SIGTERM)
    child.close()
    end.close()


def test_the_fork_server_outlives_a_shortage_of_descriptors(
    probe: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    with output.open("wb") as file:
        server = ForkServerProcess([], os.environ, file.fileno())
    monkeypatch.setenv(settings.FORK_SERVER.name, server.name)
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    child, (end,) = run(["status", "0"])  # it is up
    assert child.wait(20) == 0
    child.close()
    end.close()
    soft, _ = resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (4, hard))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, ["status", "5"])
        deadline = time.monotonic() + 20
        while "no process can be started: Too many open files" not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
        child, (end,) = running.result(20)
    assert child.wait(20) == 5
    child.close()
    end.close()
    server.close()


def test_callers_of_the_fork_server_who_ask_nothing_keep_nobody_waiting(server: ForkServerProcess) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(f"\0{server.name}")
        begin = time.monotonic()
        child, (end,) = run(["status", "3"])
        assert child.wait(20) == 3
        assert time.monotonic() - begin < 20
        child.close()
        end.close()


def test_the_end_of_the_fork_server_is_described(server: ForkServerProcess) -> None:
    assert server.end() == ""
    os.kill(server.pid, signal.SIGKILL)
    assert readable([server], 10)
    assert server.end() == f"the fork server (pid {server.pid}) was killed by SIGKILL"


def test_a_process_that_another_had_started_is_found_by_id_and_start() -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        started = process_started(process.pid)
        assert Child.find("wafer", process.pid, started + 1) is None  # the number is another's
        child = Child.find("wafer", process.pid, started)
        assert child is not None
        assert child.poll() is None
        child.terminate()
        assert child.wait(30.0) != 0
        assert child.cause == f"its process (pid {process.pid}) ended"
        child.close()
    assert Child.find("wafer", process.pid, started) is None
    with pytest.raises(ProcessLookupError):
        process_started(process.pid)


def test_a_process_that_is_ending_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are closed before it is a zombie, and who is told of that looks at once."""
    pid = os.getpid()
    started, fields = process_started(pid), spawning._stat_fields(pid)
    assert is_running(pid, started)
    assert not is_running(pid, started + 1)
    fields[6] = str(int(fields[6]) | 0x4)
    monkeypatch.setattr(spawning, "_stat_fields", lambda _: fields)
    assert not is_running(pid, started)
