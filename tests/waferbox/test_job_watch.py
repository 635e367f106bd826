"""The commands that follow a job, while the management service goes away and another comes."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from fake_management import FakeManagement, job, log
from rich.console import Console
from terminal import on_terminal
from typer.testing import CliRunner, Result

from waferbox import deadlines
from waferbox.commands import connection, top
from waferbox.commands.cli import app
from wsc.v1 import management_pb2, observation_pb2

JOB = "job-1a2b3c4d"


@dataclass
class Mortal(FakeManagement):
    """Dies at the end of what it has told, and is back, as another, after so many vain calls."""

    lives: list[list[observation_pb2.JobEvent]] = field(default_factory=list)  # what each has to tell of the job
    vain: int = 2  # calls in between
    knows: bool = True  # the job, once it is back
    refusals: int = 0  # of traces, once it is back
    _calls: int = 0
    _life: int = 0

    def GetJob(
        self, request: management_pb2.GetJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.GetJobResponse:
        self._calls += 1
        if self._calls <= self.vain:
            context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        if not self.knows:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such job")
        return super().GetJob(request, context)

    def WatchJob(
        self, request: observation_pb2.WatchJobRequest, context: grpc.ServicerContext
    ) -> Iterator[observation_pb2.JobEvents]:
        events = self.lives[self._life]
        self._life += 1
        wanted = [event for event in events if event.number > request.after or event.HasField("report")]
        yield observation_pb2.JobEvents(events=[event for event in wanted if event.WhichOneof("kind") in request.kinds])
        if self._life < len(self.lives):
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        self.jobs[0].phase = management_pb2.JOB_PHASE_SUCCEEDED

    def TraceJob(
        self, request: observation_pb2.TraceJobRequest, context: grpc.ServicerContext
    ) -> Iterator[observation_pb2.TraceJobResponse]:
        self.requested.append(request)
        if 1 < len(self.requested) <= 1 + self.refusals:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is being traced already")
        span = observation_pb2.Span(node="wafer-0", what="compute", step=len(self.requested), begin=1e9, seconds=0.1)
        yield observation_pb2.TraceJobResponse(spans=[span])
        if len(self.requested) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mortal]:
    fake = Mortal(jobs=[job(JOB, "RUNNING")])
    server = fake.serve()
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", fake.address)
    monkeypatch.setattr(connection, "RETRY_SECONDS", 0.02)
    yield fake
    server.stop(None).wait(5.0)


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def numbered(first: int, last: int) -> list[observation_pb2.JobEvent]:
    events = [log("wafer-0", f"line {number}") for number in range(first, last + 1)]
    for number, event in enumerate(events, first):
        event.number = number
    return events


def lines(result: Result) -> list[int]:
    return [int(line.rpartition(" ")[2]) for line in result.stdout.splitlines()]


def remarks(fake: Mortal, result: Result) -> list[str]:
    return [line.replace(fake.address, "HERE").removeprefix("waferbox: ") for line in result.stderr.splitlines()]


AWAY = "the management service at HERE is away; waiting for it, 60 s at most"
ENDED = f"{JOB} has ended (succeeded)"


def test_each_line_comes_once(fake: Mortal) -> None:
    fake.lives = [numbered(1, 3), numbered(1, 5), numbered(1, 6)]
    result = call("logs", "-f", JOB)
    assert (result.exit_code, lines(result)) == (0, [1, 2, 3, 4, 5, 6])
    assert remarks(fake, result) == [AWAY, "it is back, after 0 s"] * 2 + [ENDED]


def test_lines_that_nobody_has_any_more_are_counted(fake: Mortal) -> None:
    fake.lives = [numbered(3, 4), [*numbered(6, 7), *numbered(10, 10)]]
    result = call("logs", "-f", JOB)
    assert lines(result) == [3, 4, 6, 7, 10]
    told = [remark.partition(" not kept")[0] for remark in remarks(fake, result) if "kept" in remark]
    assert told == ["2 messages are", "1 message is", "2 messages are"]
    fake.lives, fake._life = [numbered(2, 2)], 0
    assert "1 message is not kept, from before " in call("logs", JOB).stderr


def test_what_stays_away_is_given_up(fake: Mortal, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.lives, fake.vain = [numbered(1, 1), []], 1 << 30
    monkeypatch.setattr(deadlines, "QUERIES", replace(deadlines.QUERIES, management_away=0.1))
    for command in (["logs", "-f", JOB], ["trace", JOB]):
        fake._life = 0
        result = call(*command)
        assert result.exit_code == 4
        assert remarks(fake, result)[-1] == "the management service at HERE did not come back within 0.1 s"


def test_one_that_is_back_without_the_job(fake: Mortal, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.lives, fake.knows = [numbered(1, 1), []], False
    monkeypatch.setattr(deadlines, "QUERIES", replace(deadlines.QUERIES, job_unknown=0.1))
    result = call("logs", "-f", JOB)
    assert result.exit_code == 3
    assert f"is back, but does not know {JOB}" in remarks(fake, result)[-1]


def test_a_trace_begins_anew(fake: Mortal, tmp_path: Path) -> None:
    fake.refusals = 2  # the coordinator is still at what nobody waits for any more
    file = tmp_path / "trace.json"
    result = call("trace", JOB, "-o", str(file))
    assert result.exit_code == 0, result.output
    assert remarks(fake, result)[:1] == [AWAY]
    assert {e["args"]["step"] for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"} == {4}


def test_top_goes_on(fake: Mortal, monkeypatch: pytest.MonkeyPatch) -> None:
    def report(steps: int) -> observation_pb2.JobEvent:
        node = observation_pb2.NodeReport(node="wafer-0", time=steps / 10, execution=1, step=steps)
        return observation_pb2.JobEvent(report=node)

    fake.lives = [[report(10)], [report(10), report(30)]]
    screen = io.StringIO()
    monkeypatch.setattr(top, "output", Console(file=screen, force_terminal=True, width=80, height=24))
    result = call("top", JOB)
    assert (result.exit_code, result.stdout) == (0, f"{ENDED}\n")
    assert remarks(fake, result) == [AWAY, "it is back, after 0 s"]
    assert "10.0" in screen.getvalue().rpartition("steps/s")[2]


@pytest.mark.cluster
@pytest.mark.parametrize("arguments", [["logs", "-f"], ["top"], ["trace"]])
def test_ctrl_c_ends_it_while_management_is_away(fake: Mortal, arguments: list[str]) -> None:
    fake.lives, fake.vain = [numbered(1, 1), []], 1 << 30
    status, text = on_terminal(*arguments, JOB, until="is away")
    assert status == 130, text
    assert "Traceback" not in text
