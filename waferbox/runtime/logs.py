"""The log of a process on standard error, and advice, which also reaches the script's terminal."""

import logging

from waferbox import roles, settings

# --- Advice -----------------------------------------------------------------------------------------------------------

_PREFIX = "advice."  # of the names of its loggers


def advise(subject: str, message: str) -> None:
    """Logs a warning for the user of a job that continues. The user sees the first advice on each subject."""
    logging.getLogger(_PREFIX + subject).warning("%s", message)


def is_advice(logger: str) -> bool:
    """Whether the records of a logger are advice."""
    return logger.startswith(_PREFIX)


# --- Standard error ---------------------------------------------------------------------------------------------------

_FORMAT = "%(asctime)s %(process)d %(name)s %(levelname)s: %(message)s"

# Packages whose loggers record from the level info; others, from warning.
_PACKAGES = frozenset({"waferbox", *(role.module.partition(".")[0] for role in roles.ROLES)})


def set_up_logging() -> None:
    """Sets up the log of a process of the cluster. Called once.

    Raises:
        SystemExit: the environment names no level.
    """
    try:
        level = settings.LOG_LEVEL.get()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    terminal = logging.StreamHandler()
    terminal.setLevel(level)
    # The client prints advice, perhaps on the terminal of this process.
    terminal.addFilter(lambda record: not is_advice(record.name))
    logging.basicConfig(level=logging.WARNING, format=_FORMAT, handlers=[terminal])
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(min(level, logging.INFO))
