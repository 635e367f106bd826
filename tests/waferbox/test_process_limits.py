"""Too few processes and threads, and too small files: what every part says of it."""

import errno
import importlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from waferbox.host import process_limits
from waferbox.host.process_limits import failed_start, thread_shortage
from waferbox.input_process.failures import summary
from waferbox.launch import process, spawn
from waferbox.launch.fork_server import ForkServer
from waferbox.roles import MANAGEMENT
from waferbox.runtime.role_job import failure_of
from waferbox.states.state_memory import _create
from wsc.v1 import node_pb2

NO_THREAD = RuntimeError("can't start new thread")
NO_PROCESS = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
SENTENCE = r"no more threads or processes can be started: .* \(`ulimit -u`\), .* \(pids\.max .* Raise the smaller limit"


@pytest.mark.parametrize(
    ("groups", "membership", "shown"),
    [
        ({"a/b": "max", "a": "70"}, "0::/a/b", "service 70 (pids.max"),
        ({"pids/a": "9", "pids": "90", "memory/a": "1"}, "4:memory:/a\n8:pids:/a", "service 9 (pids.max"),
        ({"a": "max"}, "0::/a", "service any number (pids.max"),
        ({}, "nonsense", "service any number (pids.max"),
    ],
)
def test_the_limits_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, str], membership: str, shown: str
) -> None:
    for group, limit in groups.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "pids.max").write_text(f"{limit}\n")
    (tmp_path / "membership").write_text(membership)
    monkeypatch.setattr(process_limits, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(process_limits, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (120, 120))
    assert "the user may have 120 (`ulimit -u`)" in thread_shortage(NO_THREAD)
    assert shown in thread_shortage(NO_THREAD)


def test_other_errors_are_left_as_they_are() -> None:
    assert thread_shortage(RuntimeError("another")) == thread_shortage(ValueError(str(NO_THREAD))) == ""
    assert failed_start(FileNotFoundError(errno.ENOENT, "nothing")) == "[Errno 2] nothing"


def test_a_process_that_can_start_no_thread_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        raise NO_THREAD

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=main))
    monkeypatch.setattr(process, "_libc", SimpleNamespace(prctl=lambda *arguments: 0))
    monkeypatch.setattr(sys, "argv", [])
    assert process.run_module(MANAGEMENT.module, []) == 1
    messages = capfd.readouterr().err
    assert messages.startswith(f"{MANAGEMENT.module}: no more threads or processes can be started")
    assert "Traceback" not in messages


def test_a_job_without_a_thread_ends_with_the_sentence() -> None:
    failure = failure_of("wafer-0", NO_THREAD)
    assert failure.kind == node_pb2.Failure.KIND_USER
    assert failure.message == thread_shortage(NO_THREAD)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_shared_memory_beyond_the_limit_of_files_ends_a_job_with_the_limit(tmp_path: Path, is_on_disk: bool) -> None:
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most))
    try:
        with pytest.raises(OSError, match="shared memory") as caught:
            _create(1 << 20, tmp_path if is_on_disk else None, "the states")
        failure = failure_of("worker-0", caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failure.kind == node_pb2.Failure.KIND_USER
    assert failure.message.startswith("1,048,576 bytes of shared memory are needed")
    assert "may have 4,096 bytes. Raise that, with `ulimit -f unlimited`" in failure.message


def test_a_python_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise NO_PROCESS

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    with pytest.raises(spawn.SpawnError, match=f"appliance could not be started: {SENTENCE}"):
        spawn.spawn_python(MANAGEMENT.module, [])


def test_a_fork_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise NO_PROCESS

    monkeypatch.setattr(os, "fork", refuse)
    server = ForkServer.__new__(ForkServer)
    with pytest.raises(OSError, match=SENTENCE):
        server._fork(None, MANAGEMENT.module, [], [], outlives=False, end_signal=signal.SIGTERM)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [NO_THREAD, NO_PROCESS])
def test_a_loader_that_can_start_no_process(error: Exception) -> None:
    assert "is it the limit of processes and threads (`ulimit -u`, pids.max)?" in summary(error)
