"""From which step on a trace is asked for."""

import time

from appliance.coordinator.observation.spans import Pace, SpanRecording
from wsc.v1 import node_pb2, observation_pb2


def test_a_trace_begins_soon_where_most_steps_were_done_in_an_earlier_epoch() -> None:
    commands: list[node_pb2.AttachRequest] = []

    def command(request: node_pb2.AttachRequest) -> int:
        commands.append(request)
        return 1

    pace = Pace()
    recording = SpanRecording(pace, command, lambda request: True)
    recording.request(3, execution=1)
    report = observation_pb2.NodeReport(
        node="wafer-0", execution=1, step=10_000, done_steps=10_000, time=time.time(), seconds={"total": 0.0}
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
