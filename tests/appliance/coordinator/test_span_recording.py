"""From which step on a trace is asked for."""

import time

from appliance.coordinator.observation.spans import SpanRecording
from wsc.v1 import node_pb2, observation_pb2


def test_a_trace_begins_soon_where_most_steps_were_done_in_an_earlier_epoch() -> None:
    commands: list[node_pb2.AttachRequest] = []

    def command(request: node_pb2.AttachRequest) -> int:
        commands.append(request)
        return 1

    recording = SpanRecording(command, lambda request: True)
    recording.request(3, execution=1)
    report = observation_pb2.NodeReport(
        node="wafer-0", execution=1, step=10_000, done_steps=10_000, time=time.time(), seconds={"total": 0.0}
    )
    recording.reported(report)
    assert not commands  # of this epoch nothing is known
    report.step, report.time = 10_010, time.time()
    report.seconds["total"] = 100.0  # ten seconds a step
    recording.reported(report)
    (request,) = commands
    assert 10_010 < request.trace.first_step <= 10_020
