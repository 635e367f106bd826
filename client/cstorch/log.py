"""Where cstorch's own log lines go when the script has not set up logging."""

import logging
import sys
from typing import TextIO

_FORMAT = "%(asctime)s %(levelname)s:   %(message)s"


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is at the moment: a progress bar replaces it to keep the lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure() -> None:
    """Shows cstorch's INFO lines on standard error, unless the script, or an earlier call, chose where they go."""
    logger = logging.getLogger("cstorch")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if logging.getLogger().handlers or logger.handlers:
        return
    handler = _StandardError()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
