"""When recovery points are made while steps run: every so many seconds, after a step that nobody has reached yet."""

import time
from collections.abc import Callable

from appliance.coordinator.execution.execution_points import recovery_seconds
from appliance.coordinator.observation.pace import Pace

LEAD_SECONDS = 0.5  # for the command to reach all nodes


class PointSchedule:
    """Used by one thread."""

    def __init__(self, pace: Pace, keep: Callable[[int], bool]) -> None:
        """keep(step): have one made after this step; False if the execution has no such step."""
        self._pace = pace
        self._keep = keep
        self._interval = recovery_seconds()
        self._last = time.monotonic()
        self._execution = 0

    def tick(self, execution: int) -> None:
        """To be called once a second while an execution runs. execution: the number that nodes have for it."""
        now = time.monotonic()
        if execution != self._execution:
            self._execution, self._last = execution, now
        if now - self._last < self._interval:
            return
        step = self._pace.step_after(LEAD_SECONDS, execution)
        if step is not None and self._keep(step):
            self._last = now
