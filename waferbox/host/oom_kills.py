"""Processes that the kernel has killed for want of memory."""

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

_STATISTICS: Final = Path("/proc/vmstat")
_COUNT: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_SAMPLES: Final = 3


def oom_kills() -> int:
    """Returns how many processes of this host, containers included, were killed so since its start; 0: unknown."""
    try:
        found = _COUNT.search(_STATISTICS.read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


class OomWatch:
    """The kills of the last seconds. The kernel counts a kill before the process ends. Used by one thread."""

    def __init__(self, count: Callable[[], int]) -> None:
        """count: as oom_kills."""
        self._count = count
        self._samples = deque([count()], maxlen=_SAMPLES)

    def tick(self) -> None:
        """Takes a sample; to be called once a second."""
        self._samples.append(self._count())

    def has_killed(self) -> bool:
        """Whether the kernel has killed a process of this host for want of memory within the last seconds."""
        return self._count() > self._samples[0]
