"""What a node sends to the coordinator of its job: answers, and beside them its log and its reports."""

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator

from waferbox.host.memory import is_refused_memory
from waferbox.runtime.logs import is_advice
from wsc.v1 import node_pb2, observation_pb2

# --- The log of the job that a process works for: what the process logs meanwhile, as records -------------------------


MAX_MESSAGE_CHARACTERS = 8000


class JobLogHandler(logging.Handler):
    """Hands what is logged to a job. Used in a with statement, it takes part in all logging of the process."""

    def __init__(self, node: str, add: Callable[[observation_pb2.LogRecord], None]) -> None:
        """node: who says it. add is called in whatever thread logs, and must not block."""
        super().__init__()
        self._node = node
        self._add = add
        self._formatter = logging.Formatter("%(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        message = self._formatter.format(record)
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = f"{message[:MAX_MESSAGE_CHARACTERS]}…"
        self._add(
            observation_pb2.LogRecord(
                node=self._node, time=record.created, level=record.levelno, logger=record.name, message=message
            )
        )

    def __enter__(self) -> "JobLogHandler":
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger().removeHandler(self)


# --- What a node sends to the coordinator of its job: answers, and beside them its log and its reports ----------------
#
# Answers are sent in order, all of them. Log records are sent in batches, errors and advice at once; where they come
# faster than they go, the oldest give way, and it is said how many. The thread that sends is the one that notices
# that a
# report is due.


BATCH_SECONDS = 1.0
MAX_EVENTS = 1000  # that wait
WARNING, ERROR = 30, 40  # as in Python's logging

Report = Callable[[], observation_pb2.NodeReport | None]


class EventBatch:
    """Events that wait to be sent, and not too many. Not thread-safe."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._events: deque[observation_pb2.JobEvent] = deque(maxlen=MAX_EVENTS)
        self._dropped = 0
        self.urgent = False  # an error, or advice, is among them

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: observation_pb2.JobEvent) -> None:
        self._dropped += len(self._events) == MAX_EVENTS
        self._events.append(event)
        self.urgent |= event.log.level >= ERROR or is_advice(event.log.logger)

    def events(self) -> observation_pb2.JobEvents:
        """All of them."""
        events = observation_pb2.JobEvents()
        if self._dropped:
            note = observation_pb2.LogRecord(
                node=self._node,
                time=time.time(),
                level=WARNING,
                logger="interconnect",
                message=f"{self._dropped} records came too fast, and were dropped",
            )
            events.events.add(log=note)
        events.events.extend(self._events)
        return events

    def clear(self) -> None:
        self._events.clear()
        self._dropped, self.urgent = 0, False


class Outbox:
    """One job's. put, log and close: from any thread; iterated over by the one that sends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._responses: deque[node_pb2.AttachResponse] = deque()
        self._waiting = EventBatch("")
        self._node = ""
        self._report: Report = lambda: None
        self._check: Callable[[], None] = lambda: None
        self._closed = False

    def open(self, node: str, report: Report, check: Callable[[], None]) -> None:
        """The node has a name. check() is called, and report() asked, when a report is due."""
        with self._changed:
            self._node = node
            self._waiting = EventBatch(node)
            self._report = report
            self._check = check

    def put(self, response: node_pb2.AttachResponse) -> None:
        """Never blocks."""
        with self._changed:
            self._responses.append(response)
            self._changed.notify()

    def fail(self, error: Exception) -> None:
        """A thread of the job has ended by an exception that it did not expect. Never blocks."""
        self.put(self.failure(error))

    def failure(self, error: Exception) -> node_pb2.AttachResponse:
        """What ends the job with the traceback of an exception."""
        failed = node_pb2.Failure(
            kind=node_pb2.Failure.KIND_INTERNAL,
            node=self._node,
            message=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
            is_unfit=is_refused_memory(error),
        )
        return node_pb2.AttachResponse(failed=failed)

    def log(self, record: observation_pb2.LogRecord) -> None:
        """Never blocks."""
        with self._changed:
            self._waiting.add(observation_pb2.JobEvent(log=record))
            if self._waiting.urgent:
                self._changed.notify()

    def close(self) -> None:
        """What is there is sent, and then no more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def __iter__(self) -> Iterator[node_pb2.AttachResponse]:
        due = time.monotonic() + BATCH_SECONDS
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._responses or self._waiting.urgent or self._closed, max(0.0, due - time.monotonic())
                )
                responses, self._responses = self._responses, deque()
                over = self._closed
                # The last report of an execution comes before the word of its end.
                is_due = time.monotonic() >= due or any(response.HasField("finished") for response in responses)
                flush = is_due or over or self._waiting.urgent or any(r.HasField("failed") for r in responses)
                events = observation_pb2.JobEvents()
                if flush:
                    events = self._waiting.events()
                    self._waiting.clear()
                report, check = (self._report, self._check) if is_due and not over else (None, None)
            if report is not None and check is not None:
                due = time.monotonic() + BATCH_SECONDS
                check()
                said = report()
                if said is not None:
                    events.events.add(report=said)
            if events.events:
                yield node_pb2.AttachResponse(events=events)
            yield from responses
            if over:
                return
