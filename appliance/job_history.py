"""The history of one job: the last events of each kind, and a stream of new ones for watchers.

The management service has one history of each job. The job's coordinator has another, which it sends to a restarted
management service: the numbers of the events show which are new.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import TypeAlias

from waferbox import roles
from waferbox.host.event_loop import Mailbox
from wsc.v1 import management_pb2, observation_pb2

KINDS = ("report", "log", "scalar")
MAX_REPORTS = 1000
MAX_LOGS = 2000
MAX_POINTS = 1000  # points of a curve
MAX_CURVES = 64
MAX_TEXT = 10_000  # characters of a message
MAX_NAME = 256  # characters of the name of a node, a logger or an output
MAX_NODES = 1 << 16  # nodes whose last reports are kept
MAX_FIGURES = 64  # figures of a kind in a report
MAX_LAYERS = 4096  # layers in a report
MAX_MEASURED = 4  # executions whose last times by layer are kept
MAX_BEHIND = 1000  # unread batches of a watcher
BATCH_EVENTS = 500
BATCH_BYTES = 1 << 20
_MAX_NUMBER = 1 << 62  # larger numbers are invalid

_Numbered: TypeAlias = tuple[int, observation_pb2.JobEvent]


class TooSlow(Exception):
    """Raised when a watcher reads events more slowly than they happen."""


class Watcher:
    """A reader of a job's events, in an event loop. batches() ends with the job; the rest is thread-safe."""

    def __init__(self, kinds: Sequence[str], after: int) -> None:
        """after: log records up to this number are skipped."""
        self._kinds = frozenset(kinds)
        self._after = after
        self._batches: Mailbox[list[observation_pb2.JobEvent]] = Mailbox()
        self._dropped = False

    def put(self, events: list[observation_pb2.JobEvent]) -> None:
        """Adds events. Never blocks."""
        if self._dropped:
            return
        if len(self._batches) >= MAX_BEHIND:
            self._dropped = True
            self.end()
            return
        wanted = [event for event in events if self._wants(event)]
        if wanted:
            self._batches.put(wanted)

    def _wants(self, event: observation_pb2.JobEvent) -> bool:
        kind = event.WhichOneof("kind")
        return kind in self._kinds and not (kind == "log" and event.number <= self._after)

    def end(self) -> None:
        """Ends batches()."""
        self._batches.close()

    async def batches(self) -> AsyncIterator[list[observation_pb2.JobEvent]]:
        """Yields batches of events. Raises TooSlow."""
        async for batch in self._batches.messages():
            if self._dropped:
                break
            yield batch
        if self._dropped:
            raise TooSlow


class Curve:
    """One scalar of a job since its beginning. Above MAX_POINTS every second point is dropped, again and again."""

    def __init__(self) -> None:
        self._points: list[_Numbered] = []
        self._last: _Numbered | None = None
        self._stride = 1
        self._seen = 0

    def add(self, point: _Numbered) -> None:
        if self._seen % self._stride == 0:
            self._points.append(point)
            if len(self._points) > MAX_POINTS:
                del self._points[1::2]
                self._stride *= 2
        self._seen += 1
        self._last = point

    def points(self) -> Sequence[_Numbered]:
        """Returns the points, always with the last one."""
        if self._last is None or self._points[-1] is self._last:
            return self._points
        return [*self._points, self._last]


class JobHistory:
    """The last events of a job, with the watchers of new ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._numbers = dict.fromkeys(KINDS, 0)  # of the last event of each kind
        self._reports: deque[_Numbered] = deque(maxlen=MAX_REPORTS)
        self._logs: deque[_Numbered] = deque(maxlen=MAX_LOGS)
        self._curves: dict[str, Curve] = {}
        self._last_reports: dict[str, observation_pb2.NodeReport] = {}
        # By execution, the last report with times by layer: these are long, and the other reports are kept without.
        self._measured: dict[int, _Numbered] = {}
        self._watchers: list[Watcher] = []
        self._ended = False

    def add(self, events: Sequence[observation_pb2.JobEvent]) -> None:
        """Adds events. An event without a number gets the next of its kind; a known one is ignored."""
        with self._lock:
            new = [event for event in events if self._is_new(event)]
            for event in new:
                self._keep(event)
            for watcher in self._watchers:
                watcher.put(new)

    def end(self, report: management_pb2.JobReport) -> None:
        """Ends the job; if it did not succeed, its error becomes the last log record."""
        phase = report.phase
        if phase != management_pb2.JOB_PHASE_SUCCEEDED:
            level = 40 if phase == management_pb2.JOB_PHASE_FAILED else 30
            verdict = observation_pb2.LogRecord(
                node=roles.MANAGEMENT.name,
                time=time.time(),
                level=level,
                logger="verdict",
                message=report.message,
                verdict=True,
            )
            self.add([observation_pb2.JobEvent(log=verdict)])
        with self._lock:
            self._ended = True
            for watcher in self._watchers:
                watcher.end()

    def kept(self, kinds: Sequence[str]) -> list[observation_pb2.JobEvent]:
        """Returns the kept events, in order."""
        with self._lock:
            return self._history(kinds)

    def watch(self, kinds: Sequence[str], after: int = 0) -> Watcher:
        """Returns a watcher of the kept events and all later ones; without log records up to the number `after`.

        To be called in the event loop that reads it, and ended with unwatch.
        """
        watcher = Watcher(kinds, after)
        with self._lock:
            watcher.put(self._history(kinds))
            if self._ended:
                watcher.end()
            else:
                self._watchers.append(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """The watcher has left; its batches() ends."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
        watcher.end()

    def last_reports(self) -> Sequence[observation_pb2.NodeReport]:
        """The last of each node."""
        with self._lock:
            return list(self._last_reports.values())

    def last_scalars(self) -> Sequence[observation_pb2.Scalar]:
        """The last of each name."""
        with self._lock:
            return [curve.points()[-1][1].scalar for curve in self._curves.values()]

    def _history(self, kinds: Sequence[str]) -> list[observation_pb2.JobEvent]:
        kept: list[Iterable[_Numbered]] = []
        if "report" in kinds:
            measured = dict(self._measured.values())
            kept.append([(number, measured.get(number, event)) for number, event in self._reports])
        if "log" in kinds:
            kept.append(self._logs)
        if "scalar" in kinds:
            kept += [curve.points() for curve in self._curves.values()]
        return [event for _, event in heapq.merge(*kept, key=lambda numbered: numbered[0])]

    def _is_new(self, event: observation_pb2.JobEvent) -> bool:
        kind = event.WhichOneof("kind")
        if kind is None:
            return False
        event.number = event.number or self._numbers[kind] + 1
        if not self._numbers[kind] < event.number < _MAX_NUMBER:
            return False
        self._numbers[kind] = event.number
        return True

    def _keep(self, event: observation_pb2.JobEvent) -> None:
        self._count += 1
        match event.WhichOneof("kind"):
            case "report":
                _shorten(event.report)
                if event.report.layers:
                    event = self._without_layers(event)
                self._reports.append((self._count, event))
                if event.report.node in self._last_reports or len(self._last_reports) < MAX_NODES:
                    self._last_reports[event.report.node] = event.report
            case "log":
                log = event.log
                log.message = log.message[:MAX_TEXT]
                log.node, log.logger = log.node[:MAX_NAME], log.logger[:MAX_NAME]
                self._logs.append((self._count, event))
            case "scalar":
                event.scalar.name = event.scalar.name[:MAX_NAME]
                if event.scalar.name in self._curves or len(self._curves) < MAX_CURVES:
                    self._curves.setdefault(event.scalar.name, Curve()).add((self._count, event))

    def _without_layers(self, event: observation_pb2.JobEvent) -> observation_pb2.JobEvent:
        """Returns a report without its times by layer, which are kept if they are the last of their execution."""
        self._measured.pop(event.report.execution, None)
        if len(self._measured) >= MAX_MEASURED:
            del self._measured[next(iter(self._measured))]
        self._measured[event.report.execution] = (self._count, event)
        bare = observation_pb2.JobEvent()
        bare.CopyFrom(event)
        bare.report.ClearField("layers")
        return bare


def _shorten(report: observation_pb2.NodeReport) -> None:
    report.node = report.node[:MAX_NAME]
    for figures in (report.seconds, report.bytes, report.queued):
        if len(figures) > MAX_FIGURES or any(len(name) > MAX_NAME for name in figures):
            figures.clear()
    if len(report.layers) > MAX_LAYERS or any(len(each.layer) > MAX_NAME for each in report.layers):
        report.ClearField("layers")


def batches(events: Iterable[observation_pb2.JobEvent]) -> Iterator[observation_pb2.JobEvents]:
    """The events as messages of a moderate size."""
    batch, nbytes = observation_pb2.JobEvents(), 0
    for event in events:
        size = event.ByteSize()
        if batch.events and (len(batch.events) >= BATCH_EVENTS or nbytes + size > BATCH_BYTES):
            yield batch
            batch, nbytes = observation_pb2.JobEvents(), 0
        batch.events.append(event)
        nbytes += size
    if batch.events:
        yield batch
