"""Spans of a trace as a file in the Trace Event Format, which Perfetto and chrome://tracing open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU has the format. A process for each node;
in it a row (thread) for each kind of thing that it does, so that what overlaps between nodes lies one under the other.
"""

from collections.abc import Iterable
from typing import Any

from wsc.v1 import observation_pb2

# In the order in which they are shown.
_ROLES = ("worker", "memoryx", "swarmx", "wafer")


def chrome_trace(spans: Iterable[observation_pb2.Span]) -> dict[str, Any]:
    """The trace, ready for json.dump. Times are in microseconds from the first span's begin."""
    spans = sorted(spans, key=lambda span: span.begin)
    origin = spans[0].begin if spans else 0.0
    nodes = sorted({span.node for span in spans}, key=_place)
    rows = {what: number for number, what in enumerate(sorted({span.what for span in spans}), 1)}
    numbers = {node: number for number, node in enumerate(nodes, 1)}
    events: list[dict[str, Any]] = []
    for node, pid in numbers.items():
        events.append(_metadata("process_name", pid, 0, {"name": node}))
        events.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        for what in sorted({span.what for span in spans if span.node == node}):
            events.append(_metadata("thread_name", pid, rows[what], {"name": what}))
    for span in spans:
        events.append(
            {
                "name": f"{span.what} {span.detail}".strip(),
                "cat": span.what,
                "ph": "X",
                "ts": (span.begin - origin) * 1e6,
                "dur": span.seconds * 1e6,
                "pid": numbers[span.node],
                "tid": rows[span.what],
                "args": {"step": span.step},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _place(node: str) -> tuple[int, int, str]:
    role, _, index = node.partition("-")
    known = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return known, int(index) if index.isdecimal() else 0, node


def _metadata(name: str, pid: int, tid: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
