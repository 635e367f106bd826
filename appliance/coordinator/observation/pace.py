"""How far the nodes are: which step all of them will reach a little later, so that they can be told of it in time."""

import math
import threading
import time

from wsc.v1 import observation_pb2


class Pace:
    """By the last reports of the nodes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[str, observation_pb2.NodeReport] = {}  # the last of each node

    def reported(self, report: observation_pb2.NodeReport) -> None:
        """A node has said how far it is."""
        with self._lock:
            self._reports[report.node] = report

    def clear(self) -> None:
        """The execution is over."""
        with self._lock:
            self._reports.clear()

    def step_after(self, seconds: float, execution: int) -> int | None:
        """A step of the execution that no node begins within so many seconds; None if nobody has got through one."""
        soon = time.time() + seconds
        with self._lock:
            steps = [
                report.step + (soon - report.time) * (report.step - report.done_steps) / report.seconds["total"]
                for report in self._reports.values()
                if report.execution == execution and report.step > report.done_steps and report.seconds["total"] > 0
            ]
        return math.ceil(max(steps)) + 1 if steps else None
