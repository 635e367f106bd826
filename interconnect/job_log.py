"""The project's log: on standard error in one line a record, and in the log of the job that a process works for."""

import logging
from collections.abc import Callable

from wsc.v1 import observation_pb2

FORMAT = "%(asctime)s %(process)d %(name)s %(levelname)s: %(message)s"
MAX_MESSAGE_CHARACTERS = 8000

# Packages whose loggers say what happens, and not only what is wrong.
_PACKAGES = ("appliance", "interconnect", "memoryx", "swarmx", "wafer", "workers")


def set_up_logging() -> None:
    """To be called once, by a process of the cluster."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)


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
