"""What a process logs: on standard error, one line a record; and advice, which reaches the script's terminal too."""

import logging

from waferbox import roles, settings

# ----------------------------------------------------------------------------------------------------------------------
# Advice: what a job's user should know although the job goes on. It is logged, and reaches the script's terminal


_PREFIX = "advice."  # of the names of its loggers


def advise(subject: str, message: str) -> None:
    """Tells the user of the job; of what several processes say on a subject, the first."""
    logging.getLogger(_PREFIX + subject).warning("%s", message)


def is_advice(logger: str) -> bool:
    """Whether what a logger of this name says is advice."""
    return logger.startswith(_PREFIX)


# --- What a process of the cluster says on standard error: one line a record ------------------------------------------


_FORMAT = "%(asctime)s %(process)d %(name)s %(levelname)s: %(message)s"

# Packages whose loggers say what happens, and not only what is wrong.
_PACKAGES = frozenset({"waferbox", *(role.module.partition(".")[0] for role in roles.ROLES)})


def set_up_logging() -> None:
    """To be called once, by a process of the cluster.

    Raises:
        SystemExit: the environment names a level that there is not.
    """
    try:
        level = settings.LOG_LEVEL.get()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    terminal = logging.StreamHandler()
    terminal.setLevel(level)
    # Advice comes to a terminal through the job, which may be this one.
    terminal.addFilter(lambda record: not is_advice(record.name))
    logging.basicConfig(level=logging.WARNING, format=_FORMAT, handlers=[terminal])
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(min(level, logging.INFO))
