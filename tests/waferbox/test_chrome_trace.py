"""Spans as a file in the Trace Event Format: the fields that its documentation asks for, and times that are right."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fake_management import FakeManagement, job
from typer.testing import CliRunner

from waferbox.commands.cli import app
from waferbox.commands.trace import chrome_trace
from wsc.v1 import observation_pb2
from wsc.v1.observation_pb2 import Span

SPANS = [
    Span(node="wafer-10", what="compute", detail="layer 1", step=7, begin=1_700_000_000.5, seconds=0.25),
    Span(node="memoryx-0", what="update", detail="fc.weight", step=7, begin=1_700_000_000.75, seconds=0.125),
    Span(node="wafer-2", what="compute", detail="layer 1", step=7, begin=1_700_000_000.25, seconds=0.5),
    Span(node="wafer-2", what="wait", step=7, begin=1_700_000_000.0, seconds=0.25),
]


def test_the_format() -> None:
    trace = json.loads(json.dumps(chrome_trace(SPANS)))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(complete) + len(metadata) == len(trace["traceEvents"])
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    for event in complete:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    named = {"process_name": "name", "process_sort_index": "sort_index"}
    named |= {"thread_name": "name", "thread_sort_index": "sort_index"}
    assert all(set(event["args"]) == {named[event["name"]]} for event in metadata)
    processes = {event["args"]["name"]: event["pid"] for event in metadata if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in metadata if event["name"] == "process_sort_index"}
    assert sorted(processes, key=lambda node: order[processes[node]]) == ["memoryx-0", "wafer-2", "wafer-10"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    assert len({tid for _, tid in rows}) == len(rows)
    assert not {tid for _, tid in rows} & set(processes.values())  # or it would be taken for the main thread
    places = {e["tid"]: e["args"]["sort_index"] for e in metadata if e["name"] == "thread_sort_index"}
    of_wafer = {name: places[tid] for (pid, tid), name in rows.items() if pid == processes["wafer-2"]}
    assert sorted(of_wafer, key=of_wafer.__getitem__) == ["step", "compute", "wait"]
    found = {
        (event["pid"], rows[event["pid"], event["tid"]], event["name"], event["ts"], event["dur"]) for event in complete
    }
    assert found == {  # microseconds from the first
        (processes["wafer-2"], "step", "step 7", 0.0, 750_000.0),
        (processes["wafer-2"], "wait", "wait", 0.0, 250_000.0),
        (processes["wafer-2"], "compute", "compute layer 1", 250_000.0, 500_000.0),
        (processes["wafer-10"], "step", "step 7", 500_000.0, 250_000.0),
        (processes["wafer-10"], "compute", "compute layer 1", 500_000.0, 250_000.0),
        (processes["memoryx-0"], "step", "step 7", 750_000.0, 125_000.0),
        (processes["memoryx-0"], "update", "update fc.weight", 750_000.0, 125_000.0),
    }
    assert {event["args"]["step"] for event in complete} == {7}


def test_each_region_has_a_row_in_the_order_of_the_layers() -> None:
    places = [(1.0, "zeta"), (1.5, "alpha"), (1.6, "zeta"), (2.0, "")]
    spans = [Span(node="wafer-0", what="compute", region=region, step=1, begin=begin) for begin, region in places]
    spans.append(Span(node="wafer-0", what="wait", step=1, begin=0.5))
    names = [event for event in chrome_trace(spans)["traceEvents"] if event["name"] == "thread_name"]
    rows = [event["args"]["name"] for event in sorted(names, key=lambda event: event["tid"])]
    assert rows == ["step", "zeta", "alpha", "compute", "wait"]


def test_nothing_overlaps_in_a_row() -> None:
    """Seconds since 1970 have no more than a quarter of a microsecond; viewers take overlaps for calls in calls."""
    begin, spans = 1_790_000_000.123, []
    for number in range(200):
        spans.append(Span(node="wafer-0", what="compute", step=number // 20, begin=begin, seconds=3.3e-6))
        begin += 3.3e-6
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in chrome_trace(spans)["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sorted(len(row) for row in rows.values()) == [10, 200]
    for row in rows.values():
        assert all(one[1] <= other[0] + 1e-6 for one, other in itertools.pairwise(row))


class OneTrace(FakeManagement):
    def TraceJob(
        self, request: observation_pb2.TraceJobRequest, context: grpc.ServicerContext
    ) -> Iterator[observation_pb2.TraceJobResponse]:
        yield observation_pb2.TraceJobResponse(spans=SPANS[: request.num_steps])
        yield observation_pb2.TraceJobResponse(spans=SPANS[request.num_steps :])


@pytest.fixture
def management() -> Iterator[str]:
    fake = OneTrace(jobs=[job("job-1", "RUNNING")])
    server = fake.serve()
    yield fake.address
    server.stop(0).wait()


def test_the_command(management: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    options = ["--steps", "2", "--output", str(file), "--management", management]
    done = CliRunner().invoke(app, ["trace", "job-1", *options])
    assert done.exit_code == 0, done.output
    assert "4 spans of 3 nodes, steps 7 to 7" in done.output
    assert json.loads(file.read_text()) == chrome_trace(SPANS)
    printed = CliRunner().invoke(app, ["trace", "job-1", "--steps", "2", "-o", "-", "--management", management])
    assert json.loads(printed.stdout) == chrome_trace(SPANS)
    assert "4 spans of 3 nodes, steps 7 to 7: open" in printed.stderr
    missing = CliRunner().invoke(app, ["trace", "job-2", *options])
    assert missing.exit_code == 3
    assert "there is no job 'job-2'" in missing.output
    unwritable = CliRunner().invoke(app, ["trace", "job-1", "--output", "/proc/none/x", "--management", management])
    assert unwritable.exit_code == 1
    assert "/proc/none/x cannot be written" in unwritable.output
