"""Aggregates the events of a job: the last report of each node, the split of a step, the rate, and new curves and logs.

Events come over the wire from a job, so the size of everything is bounded.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from wsc.v1 import observation_pb2

RATE_REPORTS: Final = 16  # reports of a node over which its rates are computed
MAX_NODES: Final = 4096
MAX_CURVES: Final = 64
MAX_NEW_SCALARS: Final = 200_000
MAX_NEW_LOG: Final = 2000  # the page shows no more
ERROR: Final = 40
# The parts of a step in the order in which they are drawn. Other parts that a node reports come after them.
PARTS: Final = ("compute", "update", "reduce", "input", "send", "wait")
_TOTAL: Final = "total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a role's time in a step: `begin` and `share` are fractions of the whole."""

    name: str
    seconds: float
    begin: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSplit:
    """The time of a role in a step, as the mean over its nodes."""

    role: str
    nodes: int
    seconds: float
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """A line of the log. first_error: whether it is the first error of the job."""

    record: observation_pb2.LogRecord
    first_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLoad:
    """The resources that a node uses, by its last reports.

    Attributes:
        report: the last report.
        cpu_share: share of one core; None before a second report.
        received_rate: bytes received per second; None before a second report.
        sent_rate: bytes sent per second; None before a second report.
    """

    report: observation_pb2.NodeReport
    cpu_share: float | None
    received_rate: float | None
    sent_rate: float | None


_Reports = dict[str, deque[observation_pb2.NodeReport]]  # by the nodes' names


class JobView:
    """The state of a job by its events, which are added in order. Used by one task of the page's event loop."""

    def __init__(self) -> None:
        # By execution, the last reports of each node. Kept for the last execution, and the longest one before it.
        self._executions: dict[int, _Reports] = {}
        self._latest: _Reports = {}  # the last reports of each node, whether in an execution or not
        self._layers: dict[int, Sequence[observation_pb2.LayerTime]] = {}  # by execution, the last that were measured
        self._curves: set[tuple[int, str]] = set()
        self._scalars: deque[observation_pb2.Scalar] = deque(maxlen=MAX_NEW_SCALARS)
        self._log: deque[LogRow] = deque(maxlen=MAX_NEW_LOG)
        self.first_error: observation_pb2.LogRecord | None = None

    def add(self, events: Iterable[observation_pb2.JobEvent]) -> None:
        for event in events:
            match event.WhichOneof("kind"):
                case "report":
                    self._add_report(event.report)
                case "log":
                    self._add_log(event.log)
                case "scalar":
                    self._add_scalar(event.scalar)

    def new_scalars(self) -> Sequence[observation_pb2.Scalar]:
        """The scalars since the last call."""
        scalars = list(self._scalars)
        self._scalars.clear()
        return scalars

    def new_log(self) -> Sequence[LogRow]:
        """The log rows since the last call."""
        rows = list(self._log)
        self._log.clear()
        return rows

    def execution(self, *, longest: bool) -> int:
        """The number of the last execution, or of the one with the most steps; 0 if no node has reported any."""
        if longest:
            return max(self._executions, key=self._steps, default=0)
        return max(self._executions, default=0)

    def rate(self, execution: int) -> float | None:
        """Steps per second of the node that is furthest; None before its reports are two steps apart."""
        nodes = self._executions.get(execution)
        if not nodes:
            return None
        reports = max(nodes.values(), key=lambda reports: reports[-1].step)
        seconds = reports[-1].time - reports[0].time
        steps = reports[-1].step - reports[0].step
        return steps / seconds if seconds > 0 and steps > 0 else None

    def splits(self, execution: int) -> Sequence[RoleSplit]:
        """The split of a step for each role that has run one in the execution."""
        roles: dict[str, list[observation_pb2.NodeReport]] = {}
        for name, reports in sorted(self._executions.get(execution, {}).items()):
            roles.setdefault(name.rpartition("-")[0] or name, []).append(reports[-1])
        return [split for role, reports in roles.items() if (split := _split(role, reports)) is not None]

    def layers(self, execution: int) -> Sequence[observation_pb2.LayerTime]:
        """The measured time of a wafer's step by layer in the execution; empty if it is not known."""
        return self._layers.get(execution, ())

    def loads(self) -> Mapping[str, NodeLoad]:
        """The load of each node, by its name."""
        return {name: _load(reports) for name, reports in self._latest.items()}

    def _add_report(self, report: observation_pb2.NodeReport) -> None:
        _append(self._latest, report)
        if not report.execution or not report.step:
            return  # the node runs no execution, or has not ended a step
        if report.execution not in self._executions:
            for shorter in sorted(self._executions, key=self._steps)[:-1]:
                del self._executions[shorter]
                self._layers.pop(shorter, None)
        if report.layers:
            self._layers[report.execution] = list(report.layers)
        _append(self._executions.setdefault(report.execution, {}), report)

    def _steps(self, execution: int) -> int:
        return max(reports[-1].step for reports in self._executions[execution].values())

    def _add_log(self, record: observation_pb2.LogRecord) -> None:
        first = self.first_error is None and record.level >= ERROR
        if first:
            self.first_error = record
        self._log.append(LogRow(record=record, first_error=first))

    def _add_scalar(self, scalar: observation_pb2.Scalar) -> None:
        curve = (scalar.execution, scalar.name)
        if curve not in self._curves:
            if len(self._curves) >= MAX_CURVES:
                return
            self._curves.add(curve)
        self._scalars.append(scalar)


def _append(nodes: _Reports, report: observation_pb2.NodeReport) -> None:
    if report.node not in nodes and len(nodes) >= MAX_NODES:
        return
    reports = nodes.setdefault(report.node, deque(maxlen=RATE_REPORTS))
    if reports and reports[-1].epoch != report.epoch:
        reports.clear()  # seconds and bytes begin anew with each epoch
    reports.append(report)


def _split(role: str, reports: Sequence[observation_pb2.NodeReport]) -> RoleSplit | None:
    seconds: dict[str, float] = {}
    for report in reports:
        steps = max(1, report.step - report.done_steps)  # of the epoch, as the seconds are
        for name, amount in report.seconds.items():
            if name != _TOTAL and math.isfinite(amount) and amount > 0:
                seconds[name] = seconds.get(name, 0.0) + amount / steps / len(reports)
    total = sum(seconds.values())
    if not 0 < total < math.inf:
        return None
    parts, begin = [], 0.0
    for name in sorted(seconds, key=lambda name: (PARTS.index(name) if name in PARTS else len(PARTS), name)):
        share = seconds[name] / total
        parts.append(Part(name=name, seconds=seconds[name], begin=begin, share=share))
        begin += share
    return RoleSplit(role=role, nodes=len(reports), seconds=total, parts=parts)


def _load(reports: Sequence[observation_pb2.NodeReport]) -> NodeLoad:
    first, last = reports[0], reports[-1]
    seconds = last.time - first.time

    def rate(amount: float) -> float | None:
        return max(0.0, amount) / seconds if seconds > 0 else None

    return NodeLoad(
        report=last,
        cpu_share=rate(last.cpu_seconds - first.cpu_seconds),
        received_rate=rate(last.bytes["received"] - first.bytes["received"]) if "received" in last.bytes else None,
        sent_rate=rate(last.bytes["sent"] - first.bytes["sent"]) if "sent" in last.bytes else None,
    )
