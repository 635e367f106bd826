"""The output of a user's input_fn: each printed line becomes a record of the job's log."""

import logging
import os
import re
import select
import time
from collections.abc import Callable

from waferbox.host.threads import GuardedThread

LINE_CHARACTERS = 2000  # longer lines are cut
LINES_A_SECOND = 100  # further lines of a second are counted only
READ_BYTES = 64 * 1024  # the capacity of a pipe

_ENDS = re.compile(rb"[\r\n]+")  # A progress bar ends its lines with a carriage return.

logger = logging.getLogger("workers.input_fn")


class ConsoleReader:
    """The pipe that is the standard output and error of the input_fn's process, and a thread that logs its lines.

    Used by one thread at a time. The reader's thread takes all output, and logs at most LINES_A_SECOND, so that the
    process never waits for its output.
    """

    def __init__(self, on_defect: Callable[[Exception], None]) -> None:
        """on_defect(error) is called if the thread ends with an error, after which the pipe is not read."""
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)  # writer: the process's end
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._second = 0
        self._lines = 0  # the lines of this second
        self._last = ""  # of them: that of a traceback is the error
        self._thread = GuardedThread(self._run, name="input-output", on_defect=on_defect)
        self._thread.start()

    def close_writer(self) -> None:
        """Closes the writing end, when the process has its copy or was not started."""
        os.close(self.writer)

    def close(self) -> None:
        """Logs the rest of the output, and closes the pipe; called when the process has ended."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._reader)
        os.close(self._stop)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        rest = b""
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            data = os.read(self._reader, READ_BYTES) if self._reader in ready else b""
            *lines, rest = _ENDS.split(rest + data)
            rest = rest[: LINE_CHARACTERS + 1]
            for line in lines:
                self._log(line)
            # A process that the input_fn left behind may hold the other end open, so `close` ends the loop too.
            if not data or self._stop in ready:
                break
        self._log(rest)
        self._next_second(0)

    def _log(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if not text:
            return
        second = int(time.monotonic())
        if second != self._second:
            self._next_second(second)
        self._lines += 1
        self._last = text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]}…"
        if self._lines <= LINES_A_SECOND:
            logger.info("%s", self._last)

    def _next_second(self, second: int) -> None:
        if self._lines > LINES_A_SECOND:
            more = self._lines - LINES_A_SECOND
            logger.warning("%d lines more were printed within a second; the last: %s", more, self._last)
        self._second, self._lines = second, 0
