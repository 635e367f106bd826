"""The end of an input_fn's process with all that it has started, and what these leave behind when they are killed."""

import contextlib
import os
import signal
import time
from pathlib import Path

from nodes.launch.descriptors import readable

# Where torch's loaders hand batches over: each file has a name for some microseconds, which a kill makes for ever.
SHARED_MEMORY = Path("/dev/shm")
END_SECONDS = 5.0  # for the kernel to end what was killed


def end_group(leader: int) -> None:
    """Kill the processes of the group, wait for their end, and remove what torch's loaders had half handed over.

    Waits END_SECONDS at most: for a process in the middle of a read from a disk that hangs, for one. ProcessLookupError
    where the leader has ended already.
    """
    if os.getpgid(leader) != leader:
        return  # it has not begun yet, and has started nothing
    with contextlib.ExitStack() as closing:
        members = {}
        for pid in _members(leader):
            with contextlib.suppress(ProcessLookupError):
                members[pid] = os.pidfd_open(pid)
                closing.callback(os.close, members[pid])
        os.killpg(leader, signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        for pid, pidfd in members.items():
            if readable([pidfd], max(0.0, deadline - time.monotonic())):
                for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
                    path.unlink(missing_ok=True)


def _members(group: int) -> list[int]:
    """The processes of the group that this process can see."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(name)) == group:
                found.append(int(name))
    return found
