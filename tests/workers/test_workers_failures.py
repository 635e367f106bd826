"""Which errors of a loader are due to the death of a process of it, whose looks depend on the moment."""

import bdb
import concurrent.futures
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import signal
import time
import weakref
from collections.abc import Iterator

import pytest

from waferbox.input_process.failures import names_killed_process, summary

CLOSED = [
    ConnectionResetError(104, "Connection reset by peer"),
    ConnectionRefusedError(111, "Connection refused"),
    EOFError(),
    concurrent.futures.BrokenExecutor("a process was terminated abruptly"),
    RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
]


def caused_by(error: Exception) -> Exception:
    outer = ValueError("no batch")
    outer.__cause__ = error
    return outer


Process = multiprocessing.context.ForkProcess


@pytest.fixture(autouse=True)
def no_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.process, "_dangling", weakref.WeakSet())


@pytest.fixture
def process(no_other_processes: None) -> Iterator[Process]:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600.0,))
    process.start()
    yield process
    process.kill()
    process.join(10.0)


@pytest.mark.parametrize("error", CLOSED, ids=lambda error: type(error).__name__)
def test_a_closed_connection_is_the_death_of_a_process_that_was_killed(process: Process, error: Exception) -> None:
    process.kill()
    assert names_killed_process(error)
    assert names_killed_process(caused_by(error))


def test_a_process_whose_status_was_read_counts(process: Process) -> None:
    process.kill()
    process.join(10.0)
    assert names_killed_process(EOFError())


@pytest.mark.parametrize("error", CLOSED, ids=lambda error: type(error).__name__)
def test_a_closed_connection_is_an_error_of_the_input_while_the_processes_live(
    process: Process, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("waferbox.input_process.failures._STATUS_SECONDS", 0.01)
    assert not names_killed_process(error)


def test_a_process_that_exits_by_itself_is_an_error_of_the_input() -> None:
    process = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    process.start()
    process.join(10.0)
    assert process.exitcode == 3
    assert not names_killed_process(CLOSED[-1])


def test_torch_names_a_killed_process_by_itself() -> None:
    assert names_killed_process(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))


def test_an_error_of_the_users_code_is_not_a_death(process: Process) -> None:
    os.kill(process.pid or 0, signal.SIGKILL)
    assert not names_killed_process(ValueError("row 7 has no label"))


def test_a_debugger_without_a_terminal_is_explained() -> None:
    assert 'it has one with cstorch.backend("CPU")' in summary(bdb.BdbQuit())
