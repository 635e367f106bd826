"""Threads that sleep now and then, at random, as they enter and leave the project's functions.

What happens once in hundreds of runs, because one thread must be overtaken by another within a line or two, happens in
one run of a few. Many tests that measure time cannot pass so: who uses it looks at each failure.
"""

import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("appliance", "client", "interconnect", "memoryx", "nodes", "swarmx", "wafer", "waferbox", "workers")
CHANCE: Final = 0.05  # of a sleep, at the first calls of a function
MAX_SECONDS: Final = 0.1  # of one
HALVED_CALLS: Final = 100  # after which a function's chance is half of that, for what is called in loops


def slow_down(seed: int) -> None:
    """From now on, in the threads that this process starts."""
    threading.setprofile(_sleeper(random.Random(seed)))


def _sleeper(generator: random.Random) -> Callable[[FrameType, str, Any], None]:
    prefixes = tuple(f"{ROOT / folder}/" for folder in FOLDERS)
    calls: dict[CodeType, int] = {}

    def sleep(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or sys.is_finalizing() or not code.co_filename.startswith(prefixes):
            return
        calls[code] = calls.get(code, 0) + 1
        if generator.random() < CHANCE / (1 + calls[code] / HALVED_CALLS):
            time.sleep(generator.random() * MAX_SECONDS)

    return sleep
