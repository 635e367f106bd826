"""`waferbox trace`: a timeline of a few steps of a running job, in the Trace Event Format, which Perfetto opens."""

import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import grpc
import typer

from waferbox import roles
from waferbox.commands.connection import JobArgument, JobWatch, ManagementOption, connect, find_job
from waferbox.commands.group_flows import flows
from waferbox.output.console import STANDARD_OUTPUT, errors, fail, print_exactly, print_text
from waferbox.output.working import working
from wsc.v1 import observation_pb2

# --- The Trace Event Format -------------------------------------------------------------------------------------------
#
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU describes the format. Each node is a
# process of the trace. Its rows (threads) are its steps, and one for each activity: kinds of work, sending, waiting. In
# layer pipelined mode a wafer has a row for each region instead, in the order of the layers. An arrow (a flow) leads
# from the span that sends a group to the one that receives it on another node.


# Roles and rows in the order in which they are shown; the kinds of work are between the first and the last rows.
_ROLES: Final = (roles.WORKER.name, roles.MEMORYX.name, roles.SWARMX.name, roles.WAFER.name)
_FIRST_ROW: Final = "step"
_LAST_ROWS: Final = ("send", "wait")
_END_MARGIN: Final = 1e-3  # microseconds: a flow must end within a span, and not where the next may begin


def chrome_trace(spans: Iterable[observation_pb2.Span]) -> dict[str, Any]:
    """The trace as an object for json.dump. Times are in microseconds from the begin of the first span."""
    spans = sorted(spans, key=lambda span: span.begin)
    origin = spans[0].begin if spans else 0.0
    nodes = sorted({span.node for span in spans}, key=_node_order)
    events: list[dict[str, Any]] = []
    shown: dict[int, dict[str, Any]] = {}  # the events of spans, by the id of the object
    # Ids of threads begin after those of processes: viewers show a thread with its process's id first.
    thread = len(nodes)
    for process, node in enumerate(nodes, 1):
        events.append(_metadata("process_name", process, 0, {"name": node}))
        events.append(_metadata("process_sort_index", process, 0, {"sort_index": process}))
        own = [span for span in spans if span.node == node]
        own += _steps(own)
        regions = list(dict.fromkeys(span.region for span in own if span.region))  # the first is where a step begins
        for row in sorted({_row_name(span) for span in own}, key=lambda row: _row_order(row, regions)):
            thread += 1
            events.append(_metadata("thread_name", process, thread, {"name": row}))
            events.append(_metadata("thread_sort_index", process, thread, {"sort_index": thread}))
            in_row = {id(span): _span_event(span, process, thread, origin) for span in own if _row_name(span) == row}
            events += _without_overlaps(list(in_row.values()))
            shown |= in_row
    for number, flow in enumerate(flows(spans), 1):
        events += _flow_events(number, flow.sender.detail, shown[id(flow.sender)], shown[id(flow.receiver)])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _flow_events(number: int, name: str, sender: dict[str, Any], receiver: dict[str, Any]) -> list[dict[str, Any]]:
    """The begin and the end of a flow, each bound to the span in which it lies."""
    begin = sender["ts"]
    if receiver["cat"] == "wait":
        end = max(receiver["ts"], receiver["ts"] + receiver["dur"] - _END_MARGIN)  # a wait ends with the arrival
    else:
        end = receiver["ts"]
    end = max(begin, end)  # clocks of one host are read with a quarter of a microsecond
    flow = {"name": name, "cat": "group", "id": number}
    return [
        {**flow, "ph": "s", "ts": begin, "pid": sender["pid"], "tid": sender["tid"]},
        {**flow, "ph": "f", "bp": "e", "ts": end, "pid": receiver["pid"], "tid": receiver["tid"]},
    ]


def _steps(spans: Sequence[observation_pb2.Span]) -> list[observation_pb2.Span]:
    """A span for each step of a node, from the begin of its first span to the end of its last."""
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


def _span_event(span: observation_pb2.Span, process: int, thread: int, origin: float) -> dict[str, Any]:
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


def _without_overlaps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Removes overlaps by rounding errors between the events of a thread, which viewers would show as nested."""
    for event, following in itertools.pairwise(events):
        event["dur"] = min(event["dur"], following["ts"] - event["ts"])
    return events


def _row_name(span: observation_pb2.Span) -> str:
    return span.region or span.what


def _row_order(row: str, regions: Sequence[str]) -> tuple[int, int, str]:
    if row in regions:
        return 1, regions.index(row), row
    if row in _LAST_ROWS:
        return 3 + _LAST_ROWS.index(row), 0, row
    return 0 if row == _FIRST_ROW else 2, 0, row


def _node_order(node: str) -> tuple[int, int, str]:
    role, _, index = node.partition("-")
    known = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return known, int(index) if index.isdecimal() else 0, node


def _metadata(name: str, pid: int, tid: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


# --- The command ------------------------------------------------------------------------------------------------------


def trace(
    name: JobArgument,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Number of steps.")] = 5,
    out: Annotated[Path, typer.Option("--output", "-o", help="The file; - is standard output.", dir_okay=False)] = Path(
        "trace.json"
    ),
    seconds: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for these steps.")] = 600.0,
    management: ManagementOption = None,
) -> None:
    """Write a timeline of the next steps of a job: a file for https://ui.perfetto.dev or chrome://tracing."""
    if not math.isfinite(seconds):
        raise typer.BadParameter("--seconds: a number of seconds is needed")
    is_printed = str(out) == STANDARD_OUTPUT
    if not is_printed and not os.access(out.absolute().parent, os.W_OK):
        fail(f"{out} cannot be written: its folder is none, or is not yours")
    spans: list[observation_pb2.Span] = []
    end = time.monotonic() + seconds
    with connect(management) as cluster:
        job = find_job(cluster.jobs(), name)
        request = observation_pb2.TraceJobRequest(job=job.job, num_steps=steps)

        def begin() -> "grpc.CallIterator[observation_pb2.TraceJobResponse]":
            spans.clear()  # a repeated call traces other steps than the one that management's end has broken
            return cluster.observation.TraceJob(request, timeout=max(0.0, end - time.monotonic()))

        try:
            with working(f"waiting for the next {steps} steps of {job.job}") as work:
                for response in JobWatch(cluster, job).responses(begin):
                    spans.extend(response.spans)
                    work.at(f"{len(spans):,} spans")
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            fail(f"{job.job} ran fewer than {steps} steps within {seconds:g} s: name more --seconds, or fewer --steps")
    if not spans:
        fail("there is no trace: the job ended before these steps")
    text = json.dumps(chrome_trace(spans))
    try:
        if is_printed:
            print_exactly(text)
        else:
            out.write_text(text)
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}")
    first, last = min(span.step for span in spans), max(span.step for span in spans)
    nodes = len({span.node for span in spans})
    found = f"{len(spans)} spans of {nodes} nodes, steps {first} to {last}"
    if is_printed:
        errors.print(f"{found}: open them in Perfetto.", markup=False, soft_wrap=True)
    else:
        print_text(f"{found}, are in {out}: open it in Perfetto.")
