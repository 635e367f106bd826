"""Signals end a process whatever its main thread does, whichever thread gets them, however often they are sent."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from waferbox.launch.stop_signals import signal_name

pytestmark = pytest.mark.services

SECONDS = 10.0

# Python calls handlers in the main thread, which a signal does not wake that another thread has taken.
WAITING = """
import signal, threading
from waferbox.launch.stop_signals import on_stop_signal

over = threading.Event()
with on_stop_signal(over.set, on_defect=print):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    print("waiting", flush=True)
    over.wait()
print("over", threading.active_count())
"""


@pytest.fixture
def process() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_another_thread_takes_ends_the_wait(
    process: "subprocess.Popen[str]", number: signal.Signals
) -> None:
    process.send_signal(number)
    assert process.communicate(timeout=SECONDS)[0] == "over 1\n"
    assert process.returncode == 0


ENDING = """
import signal, sys
from waferbox.launch.stop_signals import ending_in_order

number, ignored = signal.Signals(int(sys.argv[1])), sys.argv[2] == "ignored"
signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler if not ignored else signal.SIG_IGN)
with ending_in_order():
    try:
        signal.raise_signal(number)
        print("ignored")
    finally:
        signal.raise_signal(number)
        print("in order")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_end_the_clauses_that_the_first_runs(number: signal.Signals) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING, str(int(number)), "default"], capture_output=True, text=True, timeout=SECONDS
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "in order\n", "")


def test_an_ignored_signal_stays_ignored() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING, str(int(signal.SIGINT)), "ignored"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (ended.returncode, ended.stdout) == (0, "ignored\nin order\n")


def test_a_signal_without_a_name_has_its_number() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(40) == "signal 40"
