"""The time of a SteadyEventLoop: it stands still while the process is suspended."""

import signal
import subprocess
import sys
import time

SUSPENDED_SECONDS = 3.0

CHILD = """
import asyncio
import time

from waferbox.host.event_loop import SteadyClock, SteadyEventLoop


async def sleep() -> float:
    loop = asyncio.get_running_loop()
    begin, clock_begin = loop.time(), time.monotonic()
    print("sleeps", flush=True)
    await asyncio.sleep(2.0)
    assert clock.monotonic() - begin < 3.0
    return time.monotonic() - clock_begin


clock = SteadyClock()
with asyncio.Runner(loop_factory=lambda: SteadyEventLoop(clock)) as runner:
    print(runner.run(sleep()))
"""


def test_a_sleep_is_longer_than_a_suspension_that_is_longer_than_the_sleep() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "sleeps\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(SUSPENDED_SECONDS)
        child.send_signal(signal.SIGCONT)
        seconds = float(child.stdout.readline())
    assert child.returncode == 0
    assert seconds >= SUSPENDED_SECONDS + 0.9  # at most one second of the sleep had passed in the suspension
