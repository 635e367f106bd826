"""What the script is told while its job goes on: how it stands in the queue, who died, what would help."""

import logging
import queue
from typing import Final

MAX_MESSAGES: Final = 256  # that the client has not taken


class Messages(logging.Handler):
    """Keeps what a job logs until the client takes it; what there is no room for is dropped."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(MAX_MESSAGES)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            """The client takes none: it has what it wants to know."""

    def take(self, seconds: float) -> logging.LogRecord | None:
        """The next, or None if there is none for so long."""
        try:
            return self._records.get(timeout=seconds)
        except queue.Empty:
            return None


def messages_logger(messages: Messages, parent: logging.Logger) -> logging.Logger:
    """For one job: what is logged by it goes to the client, and to the parent."""
    logger = logging.Logger(f"{parent.name}.job")
    logger.parent = parent
    logger.addHandler(messages)
    return logger
