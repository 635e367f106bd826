"""The process of one job's coordinator. Management starts it, with its settings on a pipe (descriptor 3)."""

import json
import queue
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from appliance.coordinator.compilation import cached_compiler
from appliance.coordinator.management_link import CoordinatorSettings
from appliance.coordinator.serving import Event, serve_job
from interconnect.process import FIRST_FD
from interconnect.terminal_log import set_up_logging


def read_settings(fd: int) -> CoordinatorSettings:
    """The settings that management wrote."""
    with open(fd, encoding="utf-8") as pipe:
        settings = json.load(pipe)
    return CoordinatorSettings(
        job=settings["job"],
        token=settings["token"],
        created=settings["created"],
        management=settings["management"],
        listen=settings["listen"],
        cache=Path(settings["cache"]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one job until it is over."""
    set_up_logging()
    settings = read_settings(FIRST_FD)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def end(number: int, frame: FrameType | None) -> None:
        events.put(Event.TERMINATE)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    return serve_job(settings, cached_compiler(settings.cache), events)


if __name__ == "__main__":
    sys.exit(main())
