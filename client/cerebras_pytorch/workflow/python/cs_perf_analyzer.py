"""Release 1.6's look for what a step waits for, in a log that Waferbox does not write: see the compile report."""

from typing import Any

from cstorch.errors import UsageError


def locate_csperf_log(model_dir: str) -> None:
    """The log of a run: None, there is none."""


class AssessBottlenecks:
    """Cannot be made: there is no log.

    Raises:
        UsageError: always.
    """

    def __init__(self, perf_file: Any) -> None:
        raise UsageError(f"{perf_file} is no log of Waferbox: `waferbox compile-report` shows what a step waits for")
