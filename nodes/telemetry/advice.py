"""Advice: what a job's user should know although the job goes on. It is logged, and reaches the script's terminal."""

import logging

_PREFIX = "advice."  # of the names of its loggers


def advise(subject: str, message: str) -> None:
    """Tells the user of the job; of what several processes say on a subject, the first."""
    logging.getLogger(_PREFIX + subject).warning("%s", message)


def is_advice(logger: str) -> bool:
    """Whether what a logger of this name says is advice."""
    return logger.startswith(_PREFIX)
