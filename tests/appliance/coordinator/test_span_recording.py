"""From which step on a trace is asked for."""

import time

from appliance.coordinator.observation.spans import Pace, SpanRecording
from waferbox.host.clock import SystemClock
from wsc.v1 import management_pb2, node_pb2, observation_pb2


class Rig:
    """A recording of two nodes, and the messages that it sends."""

    def __init__(self) -> None:
        self.commands: list[node_pb2.AttachRequest] = []
        self.sent: list[management_pb2.CoordinateRequest] = []
        self.pace = Pace(SystemClock())
        self.recording = SpanRecording(self.pace, self._command, self._send)

    def _command(self, request: node_pb2.AttachRequest) -> int:
        self.commands.append(request)
        return 2

    def _send(self, request: management_pb2.CoordinateRequest) -> bool:
        self.sent.append(request)
        return True

    def report(self, epoch: int) -> None:
        """Two reports, which are enough to predict a step."""
        for seconds in (1.0, 0.0):
            report = observation_pb2.NodeReport(
                node="wafer-0", epoch=epoch, step=10, time=time.time() - seconds, seconds={"total": 5.0}
            )
            self.pace.reported(report)
        self.recording.reported()


def test_a_trace_that_waits_for_reports_moves_to_the_next_epoch() -> None:
    rig = Rig()
    rig.recording.request(3, epoch=1)
    rig.recording.epoch_began(2)
    rig.report(epoch=2)
    assert [command.trace.epoch for command in rig.commands] == [2]
    assert not rig.sent


def test_a_trace_ends_with_its_epoch_although_a_dead_node_sends_nothing() -> None:
    rig = Rig()
    rig.recording.epoch_began(1)
    rig.recording.request(3, epoch=1)
    rig.report(epoch=1)
    rig.recording.recorded("wafer-0", observation_pb2.Spans(spans=[observation_pb2.Span(step=12)], last=True))
    rig.recording.epoch_began(2)
    assert [(len(request.spans.spans), request.spans.last) for request in rig.sent] == [(1, False), (0, True)]
    assert not any(request.spans.refusal for request in rig.sent)
    rig.recording.request(3, epoch=2)
    rig.report(epoch=2)
    assert [command.trace.epoch for command in rig.commands] == [1, 2]


def test_a_trace_begins_soon_where_most_steps_were_done_in_an_earlier_epoch() -> None:
    commands: list[node_pb2.AttachRequest] = []

    def command(request: node_pb2.AttachRequest) -> int:
        commands.append(request)
        return 1

    pace = Pace(SystemClock())
    recording = SpanRecording(pace, command, lambda request: True)
    recording.request(3, epoch=1)
    report = observation_pb2.NodeReport(
        node="wafer-0", epoch=1, step=10_000, done_steps=10_000, time=time.time(), seconds={"total": 0.0}
    )
    pace.reported(report)
    recording.reported()
    assert not commands  # of this epoch nothing is known
    report.step, report.time = 10_010, time.time()
    report.seconds["total"] = 100.0  # ten seconds a step
    pace.reported(report)
    recording.reported()
    (request,) = commands
    assert 10_010 < request.trace.first_step <= 10_020
