"""`waferbox trace`: what every role did in a few steps of a running job, in the Trace Event Format, which Perfetto
opens.
"""

import itertools
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
import typer

from waferbox import roles
from waferbox.commands.connection import JobArgument, JobWatch, ManagementOption, connect, find_job
from waferbox.output.console import fail, print_text
from wsc.v1 import observation_pb2

# --- Spans of a trace as a file in the Trace Event Format, which Perfetto and chrome://tracing open -------------------
#
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU has the format. A process for each
# node;
# in it a row (thread) with its steps, and one for each kind of thing that it does: its work, sending, waiting. So what
# overlaps between nodes lies one under the other, and how far one is ahead of another can be read off their steps. Of a
# wafer in layer pipelined mode each region has a row, in the order of the layers, with what it does for each micro-
# batch.


# In the order in which they are shown. Between the first and the last come the kinds of work.
_ROLES: Final = (roles.WORKER.name, roles.MEMORYX.name, roles.SWARMX.name, roles.WAFER.name)
_FIRST_ROW: Final = "step"
_LAST_ROWS: Final = ("send", "wait")


def chrome_trace(spans: Iterable[observation_pb2.Span]) -> dict[str, Any]:
    """The trace, ready for json.dump. Times are in microseconds from the first span's begin."""
    spans = sorted(spans, key=lambda span: span.begin)
    origin = spans[0].begin if spans else 0.0
    nodes = sorted({span.node for span in spans}, key=_place)
    events: list[dict[str, Any]] = []
    thread = len(nodes)  # a thread with its process's number is the main one, which is shown first
    for process, node in enumerate(nodes, 1):
        events.append(_metadata("process_name", process, 0, {"name": node}))
        events.append(_metadata("process_sort_index", process, 0, {"sort_index": process}))
        own = [span for span in spans if span.node == node]
        own += _steps(own)
        regions = list(dict.fromkeys(span.region for span in own if span.region))  # a step begins in the first
        for row in sorted({_row_of(span) for span in own}, key=lambda row: _row(row, regions)):
            thread += 1
            events.append(_metadata("thread_name", process, thread, {"name": row}))
            events.append(_metadata("thread_sort_index", process, thread, {"sort_index": thread}))
            events += _in_order([_complete(span, process, thread, origin) for span in own if _row_of(span) == row])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _steps(spans: Sequence[observation_pb2.Span]) -> list[observation_pb2.Span]:
    """Of one node: each step, from the first thing that was done in it to the last."""
    found: dict[int, observation_pb2.Span] = {}
    for span in spans:
        step = found.setdefault(
            span.step,
            observation_pb2.Span(
                node=span.node, what=_FIRST_ROW, detail=str(span.step), step=span.step, begin=span.begin
            ),
        )
        step.seconds = max(step.seconds, span.begin + span.seconds - step.begin)
    return list(found.values())


def _complete(span: observation_pb2.Span, process: int, thread: int, origin: float) -> dict[str, Any]:
    return {
        "name": f"{span.what} {span.detail}".strip(),
        "cat": span.what,
        "ph": "X",
        "ts": (span.begin - origin) * 1e6,
        "dur": span.seconds * 1e6,
        "pid": process,
        "tid": thread,
        "args": {"step": span.step},
    }


def _in_order(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a thread does one after the other, without overlaps of a rounding error: viewers take these for nesting."""
    for event, following in itertools.pairwise(events):
        event["dur"] = min(event["dur"], following["ts"] - event["ts"])
    return events


def _row_of(span: observation_pb2.Span) -> str:
    return span.region or span.what


def _row(row: str, regions: Sequence[str]) -> tuple[int, int, str]:
    if row in regions:
        return 1, regions.index(row), row
    if row in _LAST_ROWS:
        return 3 + _LAST_ROWS.index(row), 0, row
    return 0 if row == _FIRST_ROW else 2, 0, row


def _place(node: str) -> tuple[int, int, str]:
    role, _, index = node.partition("-")
    known = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return known, int(index) if index.isdecimal() else 0, node


def _metadata(name: str, pid: int, tid: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


# --- The command `waferbox trace`: what every role did, in a few steps of a running job -------------------------------


def trace(
    name: JobArgument,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="How many steps.")] = 5,
    out: Annotated[Path, typer.Option("--output", "-o", help="The file.", dir_okay=False)] = Path("trace.json"),
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to wait for these steps.")] = 600.0,
    management: ManagementOption = None,
) -> None:
    """Write a timeline of the next steps of a job: a file for https://ui.perfetto.dev or chrome://tracing."""
    spans: list[observation_pb2.Span] = []
    end = time.monotonic() + seconds
    with connect(management) as cluster:
        job = find_job(cluster.jobs(), name)
        request = observation_pb2.TraceJobRequest(job=job.job, num_steps=steps)

        def begin() -> "grpc.CallIterator[observation_pb2.TraceJobResponse]":
            spans.clear()  # what came of other steps, before management went away
            return cluster.observation.TraceJob(request, timeout=max(0.0, end - time.monotonic()))

        for response in JobWatch(cluster, job).responses(begin):
            spans.extend(response.spans)
    if not spans:
        fail("there is no trace: the job ended before these steps")
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.write_text(json.dumps(chrome_trace(spans)))
        os.replace(partial, out)
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}")
    first, last = min(span.step for span in spans), max(span.step for span in spans)
    nodes = len({span.node for span in spans})
    print_text(f"{len(spans)} spans of {nodes} nodes, steps {first} to {last}, are in {out}: open it in Perfetto.")
