"""The pace of a job's running execution, by the recent reports of its steps, and the time that is left at that pace."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from wsc.v1 import management_pb2

WINDOW_SECONDS: Final = 60.0  # the pace is that of so long a time, or of the last reports if these go back further
LEAST_REPORTS: Final = 4
LEAST_SECONDS: Final = 5.0  # below that nothing is known
MAX_REPORTS: Final = 128
SPACING_SECONDS: Final = 0.5  # between reports that are kept


@dataclass(slots=True, kw_only=True, eq=False)
class Pace:
    """The last steps of the running execution, with their times. Used by management's event loop."""

    _num_steps: int = 0
    _points: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))

    def add(self, report: management_pb2.JobReport, now: float) -> None:
        """Adds a report of the job. now: monotonic."""
        points = self._points
        has_begun_anew = report.num_steps != self._num_steps or (points and report.step < points[-1][1])
        # The pace before an interruption, or before another execution, says nothing about that which follows.
        if report.phase != management_pb2.JOB_PHASE_RUNNING or has_begun_anew or self._stands_still(now):
            points.clear()
        self._num_steps = report.num_steps
        # The steps up to the first report are not counted: caches are filled in them.
        is_due = not points or (report.step > points[-1][1] and now - points[-1][0] >= SPACING_SECONDS)
        if report.phase == management_pb2.JOB_PHASE_RUNNING and report.step and is_due:
            points.append((now, report.step))
            while len(points) > LEAST_REPORTS and points[1][0] < now - WINDOW_SECONDS:
                points.popleft()

    def seconds_left(self, now: float) -> float:
        """Returns the time until the end of the execution; 0 if it is not known. now: monotonic."""
        points = self._points
        if len(points) < LEAST_REPORTS or self._stands_still(now):
            return 0.0
        (begin, first), (end, last) = points[0], points[-1]
        if end - begin < LEAST_SECONDS:
            return 0.0
        seconds = (self._num_steps - last) * (end - begin) / (last - first)
        return max(0.0, seconds - (now - end))

    def _stands_still(self, now: float) -> bool:
        """Whether the next report is so late that the pace no longer holds."""
        points = self._points
        if not points:
            return False
        usual = (points[-1][0] - points[0][0]) / max(1, len(points) - 1)
        return len(points) > 1 and now - points[-1][0] > 3 * usual + LEAST_SECONDS
