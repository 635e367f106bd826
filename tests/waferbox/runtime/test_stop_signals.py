"""SIGTERM is heeded whatever the main thread does, and whichever thread the kernel hands it to."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

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
