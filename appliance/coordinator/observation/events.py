"""The observations of a job on their way from the nodes to management: reports, logs, outputs, traces."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from appliance.coordinator.nodes.topology import COORDINATOR, Member
from appliance.coordinator.observation.spans import Pace, SpanRecording
from appliance.job_history import KINDS, JobHistory, batches
from waferbox.host.clock import Clock, seconds_since_1970
from waferbox.runtime.logs import is_advice
from waferbox.runtime.outbox import ERROR
from wsc.v1 import management_pb2, node_pb2, observation_pb2

MAX_WAITING = 1000  # events; management finds dropped ones by gaps in the numbers, or gets them with the history


class Observation:
    """The observations of one job. Used in one event loop; nothing blocks."""

    def __init__(
        self,
        send: Callable[[management_pb2.CoordinateRequest], bool],
        command: Callable[[node_pb2.AttachRequest], int],
        advise: Callable[[str], None],
        clock: Clock,
        process_report: Callable[[str], observation_pb2.NodeReport],
    ) -> None:
        """Makes an empty history.

        Args:
            send: to the management service; False if it is away.
            command: to all nodes; returns their number.
            advise: called with a warning for the user.
            clock: of this host.
            process_report: returns a report with the figures of this process, under a name.
        """
        self._send = send
        self._advise = advise
        self._advised: set[str] = set()  # loggers
        self._kept = JobHistory()
        self._waiting: deque[observation_pb2.JobEvent] = deque(maxlen=MAX_WAITING)
        self._execution = 0  # number of the latest execution
        self._epoch = 0  # number of the current epoch; 0: none
        self._clock = clock
        self._process_report = process_report
        self.pace = Pace(clock)
        self._recording = SpanRecording(self.pace, command, send)

    def responded(self, member: Member, response: node_pb2.AttachResponse) -> bool:
        """Handles a response that is an observation; False if it is another."""
        match response.WhichOneof("kind"):
            case "events":
                for event in response.events.events:
                    event.number = 0  # only the coordinator numbers events
                    self._take(member.name, event)
            case "spans":
                for span in response.spans.spans:
                    span.node = member.name
                self._recording.recorded(member.name, response.spans)
            case _:
                return False
        return True

    def log(self, record: observation_pb2.LogRecord) -> None:
        """Adds a log record of this process."""
        self._add(observation_pb2.JobEvent(log=record))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds sampled outputs of the current execution."""
        now = seconds_since_1970(self._clock)
        for name, value in values.items():
            scalar = observation_pb2.Scalar(execution=self._execution, step=step, name=name, value=value, time=now)
            self._add(observation_pb2.JobEvent(scalar=scalar))

    def epoch_began(self, execution: int, epoch: int) -> None:
        """Notes that an epoch of an execution begins; both are numbered within the job, from 1."""
        self._execution, self._epoch = execution, epoch
        self._recording.epoch_began(epoch)

    def ended(self) -> None:
        """Notes the end of the execution on all nodes."""
        self._epoch = 0
        self._recording.execution_ended()
        self.pace.clear()
        self.flush()

    def trace(self, request: observation_pb2.TraceJobRequest) -> None:
        """Requests a trace of the next steps from the nodes."""
        self._recording.request(request.num_steps, self._epoch)

    def tick(self) -> None:
        """Does periodic work; to be called once a second."""
        if self._epoch:
            report = self._process_report(COORDINATOR)
            report.execution, report.epoch = self._execution, self._epoch
            self._add(observation_pb2.JobEvent(report=report))
        self.flush()

    def flush(self) -> None:
        """Sends waiting events; while management is away they are kept, and the oldest dropped beyond a limit."""
        messages = [management_pb2.CoordinateRequest(events=events) for events in batches(self._waiting)]
        if all(self._send(message) for message in messages):
            self._waiting.clear()

    def history(self) -> Iterator[observation_pb2.JobEvents]:
        """Yields the kept observations."""
        return batches(self._kept.kept(KINDS))

    def _take(self, node: str, event: observation_pb2.JobEvent) -> None:
        match event.WhichOneof("kind"):
            case "report":
                event.report.node, event.report.execution = node, self._execution
                self.pace.reported(event.report)
                self._recording.reported()
            case "log":
                event.log.node = node
            case _:
                return
        self._add(event)

    def _add(self, event: observation_pb2.JobEvent) -> None:
        self._kept.add([event])
        self._waiting.append(event)
        new = is_advice(event.log.logger) and event.log.logger not in self._advised
        self._advised.update([event.log.logger] if new else [])
        if new:
            self._advise(event.log.message)
        if new or event.log.level >= ERROR:
            self.flush()
