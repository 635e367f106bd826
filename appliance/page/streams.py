"""Server-sent events: the changes of a page while it is open.

The data of each event is JSON. "begin" is the first event, also after each reconnection: the browser then drops its
curves and log. "regions" has HTML by the id of its element, "scalars" new points of curves, "log" new rows as HTML.
"end" is the last event.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from appliance.job_history import TooSlow
from appliance.page.job_view import JobView
from appliance.page.rendering import (
    Regions,
    cluster_regions,
    compile_regions,
    has_ended,
    job_regions,
    log_rows,
)
from appliance.page.source import PageSource
from wsc.v1 import management_pb2

PERIOD_SECONDS: Final = 0.5
LAST_EVENTS_SECONDS: Final = 3.0  # how long a stream waits for late events after the end of a job
RETRY_MILLISECONDS: Final = 1000


async def cluster_stream(source: PageSource, closing: asyncio.Event) -> AsyncIterator[bytes]:
    """The events of the cluster's page, until `closing` is set."""
    shown: dict[str, str] = {}
    yield _begin()
    while not closing.is_set():
        regions = cluster_regions(await source.nodes(), await source.jobs())
        if changed := _changes(shown, regions):
            yield _event("regions", changed)
        await _pause(closing)


async def job_stream(source: PageSource, name: str, closing: asyncio.Event) -> AsyncIterator[bytes]:
    """The events of a job's page, until the job has ended and all its events are sent, or `closing` is set."""
    shown: dict[str, str] = {}
    view = JobView()
    artifacts: list[str] = []
    yield _begin()
    async with contextlib.aclosing(_rounds(source, name, view, closing)) as rounds:
        async for job, is_last in rounds:
            regions = dict(job_regions(job, view))
            if job.artifacts != artifacts:
                artifacts = list(job.artifacts)
                regions.update(compile_regions(job))
            if changed := _changes(shown, regions):
                yield _event("regions", changed)
            if points := _new_points(view):
                yield _event("scalars", points)
            if rows := view.new_log():
                yield _event("log", log_rows(rows))
            if is_last:
                yield _event("end", None)


async def curve_stream(source: PageSource, name: str, closing: asyncio.Event) -> AsyncIterator[bytes]:
    """The points of a job's curves, until the job has ended and all are sent, or `closing` is set."""
    view = JobView()
    yield _begin()
    async with contextlib.aclosing(_rounds(source, name, view, closing)) as rounds:
        async for _, is_last in rounds:
            view.new_log()  # is not shown, and must not grow
            if points := _new_points(view):
                yield _event("scalars", points)
            if is_last:
                yield _event("end", None)


async def _rounds(
    source: PageSource, name: str, view: JobView, closing: asyncio.Event
) -> AsyncGenerator[tuple[management_pb2.JobInfo, bool]]:
    """Yields the job whenever its changes are to be sent, and whether all its events are in the view for good."""
    ended_at = math.inf
    following = asyncio.create_task(_follow(source, name, view))
    try:
        while not closing.is_set():
            job = await source.job(name)
            if job is None:
                break
            # Read before the data is gathered: if it is true, the last events of an ended job are in this round.
            complete = following.done()
            if complete and following.exception() is not None:
                break  # the browser reconnects, and gets all stored events
            if has_ended(job):
                ended_at = min(ended_at, time.monotonic())
            is_last = has_ended(job) and (complete or time.monotonic() - ended_at > LAST_EVENTS_SECONDS)
            yield job, is_last
            if is_last:
                break
            await _pause(closing)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, TooSlow):
            await following


def _new_points(view: JobView) -> list[list[Any]]:
    """The points of curves since the last call: execution, name, step, and the value, None if it is not finite."""
    return [[s.execution, s.name, s.step, s.value if math.isfinite(s.value) else None] for s in view.new_scalars()]


async def _follow(source: PageSource, name: str, view: JobView) -> None:
    async for events in source.events(name):
        view.add(events.events)


async def _pause(closing: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PERIOD_SECONDS):
            await closing.wait()


def _changes(shown: dict[str, str], regions: Regions) -> Regions:
    changed = {name: html for name, html in regions.items() if shown.get(name) != html}
    shown.update(changed)
    return changed


def _begin() -> bytes:
    return b"retry: %d\n" % RETRY_MILLISECONDS + _event("begin", None)


def _event(name: str, data: Any) -> bytes:
    """An event as it is sent. JSON without indentation has no line breaks, so one data line is enough."""
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
