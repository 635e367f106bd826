"""Notices an execution that hangs: its thread has been busy with one thing for far too long.

A thread that waits owes nothing: for its peers, for a slow input_fn, for a client that runs a slow closure or sits in a
debugger. One that does not wait owes an end of what it does: a kernel, a copy, a send. It gets less time for that where
its process computes nothing meanwhile, and no disk is read or written for it.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nodes.telemetry.progress import Progress

HANG_VARIABLE: Final = "WAFERBOX_HANG_SECONDS"
DEFAULT_HANG_SECONDS: Final = 60.0
IDLE_PARTS: Final = 3  # of that time, one for a process that does nothing
IDLE_SHARE: Final = 0.02  # of a processor; heartbeats and reports take less
MAX_COUNTED_SECONDS: Final = 2.0  # between two looks; more has passed only where this process was suspended


def hang_seconds() -> float:
    """How long a role may be busy with one kernel before it is said to hang; one that does nothing, a third of it.

    Raises:
        ValueError: the environment says something else than a positive number.
    """
    text = os.environ.get(HANG_VARIABLE)
    if text is None:
        return DEFAULT_HANG_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{HANG_VARIABLE}={text}: it must be a number of seconds greater than 0")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What this process has taken until now, with all its threads."""

    cpu_seconds: float
    disk_bytes: int  # read and written; 0 where the system does not say

    @classmethod
    def now(cls) -> "Usage":
        nbytes = 0
        with contextlib.suppress(OSError):
            counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
            nbytes = int(counts["read_bytes"]) + int(counts["write_bytes"])
        return cls(cpu_seconds=time.process_time(), disk_bytes=nbytes)


class ProgressWatchdog:
    """Of one execution. Used by one thread, about once a second."""

    def __init__(self, seconds: float) -> None:
        """seconds: as hang_seconds."""
        self._seconds = seconds
        self._seen: tuple[object, ...] | None = None
        self._looked = 0.0
        self._busy = 0.0
        self._usage = Usage(cpu_seconds=0.0, disk_bytes=0)  # when it began to be busy

    def hang(self, progress: Progress, usage: Usage, *, waits: bool, moved_bytes: int) -> str:
        """What it does, in words, where it has been busy for too long and nothing came of it; empty: all is well.

        usage: now. waits: whether it waits for somebody else now. moved_bytes: received and sent until now.
        """
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        seen = (progress.step, progress.wait, progress.send, progress.disk, moved_bytes)
        if waits or seen != self._seen:
            self._seen, self._busy, self._usage = seen, 0.0, usage
        else:
            self._busy += min(passed, MAX_COUNTED_SECONDS)
        if self._busy > self._seconds:
            return f"it has been busy with one thing for more than {self._seconds:g} s"
        idle_seconds = self._seconds / IDLE_PARTS
        computes = usage.cpu_seconds - self._usage.cpu_seconds >= IDLE_SHARE * self._busy
        if self._busy > idle_seconds and not computes and usage.disk_bytes == self._usage.disk_bytes:
            return f"it has been busy with one thing for more than {idle_seconds:g} s, and computes nothing"
        return ""
