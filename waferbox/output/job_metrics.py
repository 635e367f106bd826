"""What the processes of a job say of themselves, as rates: between the last two reports of each."""

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from wsc.v1 import observation_pb2

STALE_SECONDS: Final = 5.0  # without a report: the rates are none any more


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMetrics:
    """One process of a job. Rates are per second; None where there are no two reports of one execution, or old ones."""

    node: str
    memory_bytes: int
    cores: float | None  # that it keeps busy: CPU seconds a second
    received: float | None  # bytes
    sent: float | None  # bytes
    steps: float | None  # None also of a process that counts none
    shares: Mapping[str, float]  # of its time, by what it went into; empty as the rates are


class JobMetrics:
    """The last of the events of a job. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: dict[str, tuple[observation_pb2.NodeReport | None, observation_pb2.NodeReport]] = {}
        self._heard: dict[str, float] = {}  # monotonic: clocks of other hosts may differ from ours
        self._scalars: dict[str, observation_pb2.Scalar] = {}

    def add(self, events: Iterable[observation_pb2.JobEvent]) -> None:
        """Take note of reports and scalars, in the order in which they were made."""
        now = time.monotonic()
        with self._lock:
            for event in events:
                if event.HasField("report"):
                    report = event.report
                    former = self._reports.get(report.node)
                    self._reports[report.node] = (former[1] if former else None, report)
                    self._heard[report.node] = now
                elif event.HasField("scalar"):
                    self._scalars[event.scalar.name] = event.scalar

    def scalars(self) -> Mapping[str, float]:
        """The last value of each output that is a single number."""
        with self._lock:
            return {name: scalar.value for name, scalar in self._scalars.items()}

    def nodes(self) -> list[NodeMetrics]:
        """The processes, those of a role together, in their order."""
        oldest = time.monotonic() - STALE_SECONDS
        with self._lock:
            found = [
                _rates(former if self._heard[node] >= oldest else None, report)
                for node, (former, report) in self._reports.items()
            ]
        return sorted(found, key=lambda metrics: _place(metrics.node))


def _rates(former: observation_pb2.NodeReport | None, report: observation_pb2.NodeReport) -> NodeMetrics:
    seconds = 0.0
    if former is not None and former.execution == report.execution:
        seconds = report.time - former.time
    if former is None or seconds <= 0.0:
        return NodeMetrics(
            node=report.node,
            memory_bytes=report.memory_bytes,
            cores=None,
            received=None,
            sent=None,
            steps=None,
            shares={},
        )
    return NodeMetrics(
        node=report.node,
        memory_bytes=report.memory_bytes,
        cores=(report.cpu_seconds - former.cpu_seconds) / seconds,
        received=(report.bytes.get("received", 0) - former.bytes.get("received", 0)) / seconds,
        sent=(report.bytes.get("sent", 0) - former.bytes.get("sent", 0)) / seconds,
        steps=(report.step - former.step) / seconds if report.step else None,
        shares={
            what: (spent - former.seconds.get(what, 0.0)) / seconds
            for what, spent in report.seconds.items()
            if what != "total"
        },
    )


def _place(node: str) -> tuple[str, int, str]:
    role, _, index = node.rpartition("-")
    return (role, int(index), "") if index.isdecimal() else (node, -1, "")
