"""The warning of a cluster that cannot run a job of all its wafers."""

from waferbox.output.console import warn
from waferbox.roles import WAFER, WORKER


def warn_of_few_workers(wafers: int, workers: int, option: str) -> None:
    """Warns of a cluster whose wafers outnumber its input workers, since each wafer of a job needs one.

    option: that which gives the number of workers, up to the number, such as "--workers ".
    """
    if workers < wafers:
        warn(
            f"each wafer of a job needs an input worker: with {WORKER.counted(workers)}, a job has at most "
            f"{WAFER.counted(workers)} of the {wafers}. For jobs of all: {option}{wafers}"
        )
