"""The log of the job that a process works for: what the process logs meanwhile, as records."""

import logging
from collections.abc import Callable

from wsc.v1 import observation_pb2

MAX_MESSAGE_CHARACTERS = 8000


class JobLogHandler(logging.Handler):
    """Hands what is logged to a job. Used in a with statement, it takes part in all logging of the process."""

    def __init__(self, node: str, add: Callable[[observation_pb2.LogRecord], None]) -> None:
        """node: who says it. add is called in whatever thread logs, and must not block."""
        super().__init__()
        self._node = node
        self._add = add
        self._formatter = logging.Formatter("%(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        message = self._formatter.format(record)
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = f"{message[:MAX_MESSAGE_CHARACTERS]}…"
        self._add(
            observation_pb2.LogRecord(
                node=self._node, time=record.created, level=record.levelno, logger=record.name, message=message
            )
        )

    def __enter__(self) -> "JobLogHandler":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger().removeHandler(self)
