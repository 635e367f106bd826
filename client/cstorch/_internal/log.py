"""The output of cstorch's log lines if the script has not set up logging, and lines for what takes long."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from cstorch._internal.notebook import notebook_shell
from waferbox.host.slow_work import SLOW_SECONDS, reported

logger = logging.getLogger("cstorch.progress")

_FORMAT = "%(asctime)s %(levelname)s:   %(message)s"


class _StandardError(logging.StreamHandler[TextIO]):
    """A handler that writes to the present sys.stderr, which a progress bar may replace to keep lines above itself.

    In a notebook, which shows that in red, lines below WARNING go to sys.stdout. It skips each line that a handler of
    the script takes. Each line is checked, since many scripts set up logging after the backend.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.addFilter(lambda record: not self._is_taken(record))
        self._is_warning = False  # the line that is written

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr if self._is_warning or notebook_shell() is None else sys.stdout

    def emit(self, record: logging.LogRecord) -> None:
        self._is_warning = record.levelno >= logging.WARNING
        super().emit(record)

    def _is_taken(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self and _takes(handler, record) for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def _takes(handler: logging.Handler, record: logging.LogRecord) -> bool:
    return record.levelno >= handler.level and not isinstance(handler, logging.NullHandler)


def configure() -> None:
    """Writes cstorch's INFO lines to standard error unless handlers of the script take them."""
    logger = logging.getLogger("cstorch")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if any(isinstance(handler, _StandardError) for handler in logger.handlers):
        return
    handler = _StandardError()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)


class SlowWork:
    """Work that may take long, and how far it is. Used by one thread, whose progress another one logs.

    Args:
        what: The work, such as "Tracing training_step".

    Attributes:
        where: The part that is under way, such as "transformer.h.7"; empty: it is not known.
    """

    def __init__(self, what: str) -> None:
        self.where = ""
        self._what = what
        self._logged = ""
        self._done = 0
        self._total = 0

    def expect(self, nbytes: int) -> None:
        """Says how many bytes the work has to do in all."""
        self._total = nbytes

    def add(self, nbytes: int) -> None:
        """Says that the work has done so many bytes more."""
        self._done += nbytes

    def log(self) -> None:
        """Logs how far the work is, unless that is the last line."""
        if self._total >= 1e6:
            unit, size, digits = ("GB", 1e9, 1) if self._total >= 1e9 else ("MB", 1e6, 0)
            done = min(self._done, self._total)  # what fails is done again
            text = f"{self._what}: {done / size:.{digits}f} of {self._total / size:.{digits}f} {unit} ..."
        else:
            text = f"{self._what}: {self.where} ..." if self.where else f"{self._what} ..."
        if text != self._logged:
            self._logged = text
            logger.info("%s", text)


@contextmanager
def logged_if_slow(what: str) -> Iterator[SlowWork]:
    """Context whose work is logged when it has taken two seconds and again from time to time, and its time at the end.

    The lines are those of the logger on a terminal, too: a bar would break those that a script itself shows there, such
    as tqdm's.

    Args:
        what: The work, such as "Tracing training_step".
    """
    work = SlowWork(what)
    began = time.monotonic()
    try:
        with reported(work.log):
            yield work
    finally:
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS:
            logger.info("%s took %.1f s", what, seconds)
