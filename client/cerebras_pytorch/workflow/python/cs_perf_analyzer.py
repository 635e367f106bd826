"""Release 1.6's analysis of bottlenecks, from a log that Waferbox does not write: see the compile report."""

from typing import Any

from cstorch.errors import UsageError


def locate_csperf_log(model_dir: str) -> None:
    """Returns None: there is no log.

    Args:
        model_dir: The folder of a run.
    """


class AssessBottlenecks:
    """The analysis of a log. It cannot be made: there is no log.

    Args:
        perf_file: The log.

    Raises:
        UsageError: Always.
    """

    def __init__(self, perf_file: Any) -> None:
        raise UsageError(f"{perf_file} is no log of Waferbox: `waferbox compile-report` shows what a step waits for")
