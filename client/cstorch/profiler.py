"""The profiler of operations, which Waferbox has not: where the time goes stands in the compile report."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["profile", "schedule"]

logger = logging.getLogger("cstorch")


def schedule(*, start_step: int, end_step: int) -> Callable[[], list[int]]:
    """Returns a schedule of the steps to profile.

    Args:
        start_step: The first step; -1: none.
        end_step: The last step.

    Reference: release 2.10, `cerebras.pytorch.profiler`.
    """
    return lambda: [start_step, end_step]


class profile:
    """A context that measures nothing, and logs so once if its schedule has steps.

    Args:
        schedule: What `schedule` returned.
        host_activities: Accepted without effect.
        on_trace_ready: Accepted without effect: there is no trace.

    Reference: release 2.10, `cerebras.pytorch.profiler`.
    """

    appliance_response: Any = None
    op_profiler_json: str | None = None  # the trace, in release 2.2

    def __init__(
        self,
        *,
        schedule: Callable[[], list[int]],
        host_activities: Sequence[str] | None = None,
        on_trace_ready: Callable[[Any], Any] | None = None,
    ) -> None:
        self.schedule = schedule
        self.host_activities = host_activities
        self.on_trace_ready = on_trace_ready

    def __enter__(self) -> "profile":
        if self.schedule()[0] >= 0:
            logger.warning(
                "Operations are not profiled here: see executor.profiler for rates, and `waferbox compile-report` for "
                "where the time of a step goes"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def get_summary(self) -> str:
        """Returns an empty string: nothing was measured."""
        return ""

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes nothing: there is no trace.

        Args:
            path: The file that the real system would write.
        """
