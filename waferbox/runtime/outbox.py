"""The responses of a node to the coordinator of its job: answers, log records and reports."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from waferbox.host.event_loop import Changes
from waferbox.runtime.logs import is_advice
from wsc.v1 import node_pb2, observation_pb2

# --- The log of the job -----------------------------------------------------------------------------------------------

MAX_MESSAGE_CHARACTERS = 8000


class JobLogHandler(logging.Handler):
    """Adds all log records of the process to the log of a job, within a with statement. Thread-safe."""

    def __init__(self, node: str, add: Callable[[observation_pb2.LogRecord], None]) -> None:
        """node: the name in the records. add: takes a record; called in any thread, must not block."""
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


# --- The outbox -------------------------------------------------------------------------------------------------------

BATCH_SECONDS = 1.0
MAX_EVENTS = 1000  # that wait to be sent
WARNING, ERROR = 30, 40  # as in Python's logging

Report = Callable[[], observation_pb2.NodeReport | None]


class EventBatch:
    """Events that wait to be sent: at most MAX_EVENTS, the oldest are dropped. Not thread-safe."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._events: deque[observation_pb2.JobEvent] = deque(maxlen=MAX_EVENTS)
        self._dropped = 0
        self.urgent = False  # whether there is an error or advice

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: observation_pb2.JobEvent) -> None:
        self._dropped += len(self._events) == MAX_EVENTS
        self._events.append(event)
        self.urgent |= event.log.level >= ERROR or is_advice(event.log.logger)

    def events(self) -> observation_pb2.JobEvents:
        """Returns all events, after a note on the number of dropped ones."""
        events = observation_pb2.JobEvents()
        if self._dropped:
            note = observation_pb2.LogRecord(
                node=self._node,
                time=time.time(),
                level=WARNING,
                logger="interconnect",
                message=f"{self._dropped} records were dropped, since they were made too fast",
            )
            events.events.add(log=note)
        events.events.extend(self._events)
        return events

    def clear(self) -> None:
        self._events.clear()
        self._dropped, self.urgent = 0, False


class Outbox:
    """The responses of a node to one coordinator. Used in one event loop.

    Answers are sent in order, all of them; log records in batches, errors and advice at once; reports once a second.
    """

    def __init__(self) -> None:
        self._changes = Changes()
        self._responses: deque[node_pb2.AttachResponse] = deque()
        self._waiting = EventBatch("")
        self._report: Report = lambda: None
        self._check: Callable[[], None] = lambda: None
        self._closed = False

    def open(self, node: str, report: Report, check: Callable[[], None]) -> None:
        """Sets the name of the node, and what is called when a report is due: `check`, then `report`."""
        self._waiting = EventBatch(node)
        self._report = report
        self._check = check

    def put(self, response: node_pb2.AttachResponse) -> None:
        """Adds an answer."""
        self._responses.append(response)
        self._changes.notify()

    def log(self, record: observation_pb2.LogRecord) -> None:
        """Adds a log record."""
        self._waiting.add(observation_pb2.JobEvent(log=record))
        if self._waiting.urgent:
            self._changes.notify()

    def close(self) -> None:
        """Ends the responses after all that was added."""
        self._closed = True
        self._changes.notify()

    async def responses(self) -> AsyncIterator[node_pb2.AttachResponse]:
        """All responses, until the outbox is closed."""
        loop = asyncio.get_running_loop()
        due = loop.time() + BATCH_SECONDS
        over = False
        while not over:
            await self._changes.until(
                lambda: self._responses or self._waiting.urgent or self._closed, max(0.0, due - loop.time())
            )
            responses, self._responses = self._responses, deque()
            over = self._closed
            # The last report of an execution precedes the answer that it has finished.
            is_due = loop.time() >= due or any(response.HasField("finished") for response in responses)
            events = observation_pb2.JobEvents()
            if is_due or over or self._waiting.urgent or any(response.HasField("failed") for response in responses):
                events = self._waiting.events()
                self._waiting.clear()
            if is_due and not over:
                due = loop.time() + BATCH_SECONDS
                self._check()
                made = self._report()
                if made is not None:
                    events.events.add(report=made)
            if events.events:
                yield node_pb2.AttachResponse(events=events)
            for response in responses:
                yield response
