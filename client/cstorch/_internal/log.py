"""The output of cstorch's log lines if the script has not set up logging, and lines for what takes long."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from cstorch._internal.notebook import notebook_shell

logger = logging.getLogger("cstorch.progress")

SLOW_SECONDS: Final = 2.0  # what takes longer is logged

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


@contextmanager
def logged_if_slow(what: str) -> Iterator[None]:
    """Context whose work is logged when it has taken two seconds, and how long it took in the end.

    Args:
        what: The work, such as "Tracing training_step".
    """
    began = time.monotonic()
    timer = threading.Timer(SLOW_SECONDS, logger.info, (f"{what} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS:
            logger.info("%s took %.1f s", what, seconds)
