"""How far the nodes are: which step all of them will reach a little later, so that they can be told of it in time."""

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from wsc.v1 import observation_pb2

WINDOW_REPORTS: Final = 4  # of a node, which make about one a second


class Pace:
    """By the last reports of the nodes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[str, deque[observation_pb2.NodeReport]] = {}  # the last of each node in its execution

    def reported(self, report: observation_pb2.NodeReport) -> None:
        """A node has said how far it is."""
        with self._lock:
            reports = self._reports.setdefault(report.node, deque(maxlen=WINDOW_REPORTS))
            if reports and reports[-1].execution != report.execution:
                reports.clear()
            reports.append(report)

    def clear(self) -> None:
        """The execution is over."""
        with self._lock:
            self._reports.clear()

    def step_after(self, seconds: float, execution: int) -> int | None:
        """A step of the execution that no node begins within so many seconds; None until two reports tell the pace."""
        soon = time.time() + seconds
        with self._lock:
            steps = [
                reports[-1].step + (soon - reports[-1].time) * _steps_per_second(reports)
                for reports in self._reports.values()
                if len(reports) > 1 and reports[-1].execution == execution and reports[-1].step > reports[-1].done_steps
            ]
        return math.ceil(max(steps)) + 1 if steps else None


def _steps_per_second(reports: Sequence[observation_pb2.NodeReport]) -> float:
    """Of late: an execution begins with as many steps as it may be ahead of its client, faster than all that follow."""
    first, last = reports[0], reports[-1]
    if last.step > first.step and last.time > first.time:
        return (last.step - first.step) / (last.time - first.time)
    return (last.step - last.done_steps) / max(last.seconds["total"], 1e-9)  # of a step that takes longer than that
