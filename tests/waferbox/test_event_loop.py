"""The time of a SteadyEventLoop: it stands still while the process is suspended."""

import signal
import subprocess
import sys
import time

from waferbox.host.event_loop import SUSPENDED_SECONDS

STOPPED_SECONDS = 3.0

CHILD = """
import asyncio
import time

from waferbox.host.event_loop import SteadyClock, SteadyEventLoop


async def wait_until_stopped() -> float:
    loop = asyncio.get_running_loop()
    begin, wall_begin = loop.time(), time.monotonic()
    print("waits", flush=True)
    while clock.suspended < 1.9:  # a busy machine suspends it for shorter times
        await asyncio.sleep(2.0)
    return (time.monotonic() - wall_begin) - (loop.time() - begin)


clock = SteadyClock()
with asyncio.Runner(loop_factory=lambda: SteadyEventLoop(clock)) as runner:
    print(runner.run(wait_until_stopped()))
"""


def test_the_time_of_a_loop_stands_still_while_its_process_is_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waits\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        child.send_signal(signal.SIGCONT)
        seconds = float(child.stdout.readline())
    assert child.returncode == 0
    assert seconds >= STOPPED_SECONDS - SUSPENDED_SECONDS - 0.01  # a wait of a second may have been under way
