"""A trace of some steps on all nodes at once.

Nodes run steps by themselves, many a second. So they are told to begin with a step that all will reach a little later,
which follows from their last reports; a trace that is asked for before there are reports waits for them.
"""

import math
import threading
import time
from collections.abc import Callable

from wsc.v1 import management_pb2, node_pb2, observation_pb2

LEAD_SECONDS = 0.25  # for the command to reach all nodes


class SpanRecording:
    """One recording at a time, of one execution. Thread-safe."""

    def __init__(
        self,
        command: Callable[[node_pb2.AttachRequest], int],
        send: Callable[[management_pb2.CoordinateRequest], bool],
    ) -> None:
        """command: to all nodes, and how many they are; send: to the management service."""
        self._command = command
        self._send = send
        self._lock = threading.Lock()
        self._reports: dict[str, observation_pb2.NodeReport] = {}  # the last of each node, in this execution
        self._wanted = 0  # steps
        self._execution = 0
        self._missing: int | None = None  # nodes that still record; None: the command has not been given

    def request(self, num_steps: int, execution: int) -> None:
        """Trace so many steps of this execution. 0: there is none."""
        with self._lock:
            if not execution or self._wanted:
                self._refuse_or_end(refusal="it is being traced already" if self._wanted else "it runs no steps now")
                return
            self._wanted, self._execution, self._missing = max(1, num_steps), execution, None
            self._begin()

    def reported(self, report: observation_pb2.NodeReport) -> None:
        """A node has said how far it is."""
        with self._lock:
            self._reports[report.node] = report
            if self._wanted and self._missing is None:
                self._begin()

    def recorded(self, node: str, spans: observation_pb2.Spans) -> None:
        """A node has recorded something."""
        with self._lock:
            if self._missing is None:
                return
            self._missing -= spans.last
            if spans.spans or not self._missing:
                self._send(
                    management_pb2.CoordinateRequest(
                        spans=observation_pb2.Spans(spans=spans.spans, last=not self._missing)
                    )
                )
            if not self._missing:
                self._wanted, self._missing = 0, None

    def execution_ended(self) -> None:
        """No node runs it any more; all have sent what they had recorded."""
        with self._lock:
            self._reports.clear()
            if self._wanted:
                too_late = self._missing is None
                self._refuse_or_end(refusal="its steps were over before it could be traced" if too_late else "")
                self._wanted, self._missing = 0, None

    def _begin(self) -> None:
        reports = [report for report in self._reports.values() if report.execution == self._execution]
        soon = time.time() + LEAD_SECONDS
        steps = [
            report.step + (soon - report.time) * (report.step - report.done_steps) / report.seconds["total"]
            for report in reports
            if report.step > report.done_steps and report.seconds["total"] > 0
        ]
        if not steps:
            return
        trace = observation_pb2.Trace(
            execution=self._execution, first_step=math.ceil(max(steps)) + 1, num_steps=self._wanted
        )
        self._missing = self._command(node_pb2.AttachRequest(trace=trace))

    def _refuse_or_end(self, refusal: str) -> None:
        self._send(management_pb2.CoordinateRequest(spans=observation_pb2.Spans(last=True, refusal=refusal)))
