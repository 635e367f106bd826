"""Makes threads sleep at random, when they enter and leave the project's functions.

A race that one run in hundreds shows, since one thread must overtake another within a line or two, appears in one run
of a few. Many tests that measure time fail with it, so each failure needs a look.
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
FOLDERS: Final = ("appliance", "client", "memoryx", "swarmx", "vendor_gateway", "wafer", "waferbox", "workers")
CHANCE: Final = 0.05  # the chance of a sleep at the first calls of a function
MAX_SECONDS: Final = 0.1  # the longest sleep
HALVED_CALLS: Final = 100  # after so many calls the chance is half, for functions that are called in loops


def slow_down(seed: int) -> None:
    """Slows down all threads that this process starts from now on."""
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
