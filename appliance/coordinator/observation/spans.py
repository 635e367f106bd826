"""A trace of some steps on all nodes at once, and an estimate of a step that no node has begun."""

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from waferbox.host.clock import Clock
from wsc.v1 import management_pb2, node_pb2, observation_pb2

# --- The pace of the nodes --------------------------------------------------------------------------------------------


WINDOW_REPORTS: Final = 4  # of a node; about one a second


class Pace:
    """The nodes' progress by their last reports, and an estimate of the steps ahead."""

    def __init__(self, clock: Clock) -> None:
        """clock: of this host."""
        self._clock = clock
        # The last ones of each node in its epoch, with the times of their arrival: clocks of hosts differ.
        self._reports: dict[str, deque[tuple[float, observation_pb2.NodeReport]]] = {}

    def reported(self, report: observation_pb2.NodeReport) -> None:
        """Notes a node's progress."""
        reports = self._reports.setdefault(report.node, deque(maxlen=WINDOW_REPORTS))
        if reports and reports[-1][1].epoch != report.epoch:
            reports.clear()
        reports.append((self._clock.monotonic(), report))

    def clear(self) -> None:
        """Clears all reports at the end of an execution."""
        self._reports.clear()

    def step_after(self, seconds: float, epoch: int) -> int | None:
        """Estimates a step that no node begins within this many seconds; None until a node has reported twice."""
        soon = self._clock.monotonic() + seconds
        steps = []
        for reports in self._reports.values():
            arrival, last = reports[-1]
            if len(reports) > 1 and last.epoch == epoch and last.step > last.done_steps:
                steps.append(last.step + (soon - arrival) * _steps_per_second(reports[0][1], last))
        return math.ceil(max(steps)) + 1 if steps else None


def _steps_per_second(first: observation_pb2.NodeReport, last: observation_pb2.NodeReport) -> float:
    """The recent speed: the first steps of an execution, up to the run-ahead, are faster than all later ones."""
    if last.step > first.step and last.time > first.time:
        return (last.step - first.step) / (last.time - first.time)
    return (last.step - last.done_steps) / max(last.seconds["total"], 1e-9)  # for steps longer than the window


# --- A trace of some steps on all nodes at once -----------------------------------------------------------------------
#
# Nodes run many steps a second on their own. A command to trace must name a step that no node has reached when the
# command arrives; it follows from the last reports. A request before the first reports waits for them.


LEAD_SECONDS = 0.25  # for the command to reach all nodes


class SpanRecording:
    """A recorder of traces: one recording at a time, of one execution."""

    def __init__(
        self,
        pace: Pace,
        command: Callable[[node_pb2.AttachRequest], int],
        send: Callable[[management_pb2.CoordinateRequest], bool],
    ) -> None:
        """pace: of the nodes. command: sends to all nodes and returns their number. send: to the management service."""
        self._pace = pace
        self._command = command
        self._send = send
        self._wanted = 0  # steps
        self._epoch = 0
        self._missing: int | None = None  # number of nodes that still record; None: the command was not sent

    def request(self, num_steps: int, epoch: int) -> None:
        """Traces this many steps of an epoch. Refuses epoch 0, in which no steps run."""
        if not epoch or self._wanted:
            self._refuse_or_end(refusal="it is being traced already" if self._wanted else "it runs no steps now")
            return
        self._wanted, self._epoch, self._missing = max(1, num_steps), epoch, None
        self._begin()

    def epoch_began(self, epoch: int) -> None:
        """Moves a trace that no node has begun to this epoch, and ends one that nodes recorded in an earlier epoch."""
        self._epoch = epoch
        if self._missing is not None:  # nodes that died with the earlier epoch send nothing
            self._refuse_or_end(refusal="")
            self._wanted, self._missing = 0, None

    def reported(self) -> None:
        """Notes a node's progress, and sends a pending command when the pace is known."""
        if self._wanted and self._missing is None:
            self._begin()

    def recorded(self, node: str, spans: observation_pb2.Spans) -> None:
        """Forwards spans that a node has recorded."""
        if self._missing is None:
            return
        self._missing -= spans.last
        if spans.spans or not self._missing:
            self._send(
                management_pb2.CoordinateRequest(spans=observation_pb2.Spans(spans=spans.spans, last=not self._missing))
            )
        if not self._missing:
            self._wanted, self._missing = 0, None

    def execution_ended(self) -> None:
        """Ends the trace at the end of the execution, after all nodes have sent their spans."""
        if self._wanted:
            too_late = self._missing is None
            self._refuse_or_end(refusal="its steps were over before it could be traced" if too_late else "")
            self._wanted, self._missing = 0, None

    def _begin(self) -> None:
        first_step = self._pace.step_after(LEAD_SECONDS, self._epoch)
        if first_step is None:
            return
        trace = observation_pb2.Trace(epoch=self._epoch, first_step=first_step, num_steps=self._wanted)
        self._missing = self._command(node_pb2.AttachRequest(trace=trace))

    def _refuse_or_end(self, refusal: str) -> None:
        self._send(management_pb2.CoordinateRequest(spans=observation_pb2.Spans(last=True, refusal=refusal)))
