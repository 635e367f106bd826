"""`waferbox logs`: the log records of a job's processes."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Final

import grpc
import typer
from rich.text import Text

from waferbox import deadlines
from waferbox.commands.connection import ENDED, Connection, JobArgument, JobWatch, ManagementOption, connect, find_job
from waferbox.output.console import errors, fail, output, printable, warn
from waferbox.output.tables import phase_text, safe, styled_phase
from waferbox.text import on_one_line
from wsc.v1 import management_pb2, observation_pb2

_NODE_WIDTH: Final = 11  # "coordinator"
_LEVEL_WIDTH: Final = 7  # "WARNING"


def logs(
    name: JobArgument,
    role: Annotated[
        str | None, typer.Option(metavar="ROLE", help="Only those of one process (wafer-0), or of a role (wafer).")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", metavar="", help="Follow the job to its end.")] = False,
    management: ManagementOption = None,
) -> None:
    """Show the messages of a job's processes, oldest first, as far as the management service keeps them."""
    seen: set[str] = set()
    shown = False
    with connect(management) as cluster:
        job = find_job(cluster.jobs(), name)
        _print_end(job)
        watch = JobWatch(cluster, job)
        for record in _followed(cluster, watch, job.job) if follow else _kept(cluster, job.job):
            seen.add(record.node)
            if role in (None, record.node, record.node.rpartition("-")[0]):
                shown = True
                output.print(_line(record), soft_wrap=True)
        if job.phase not in ENDED:
            job = watch.job()
            _print_end(job)
    if role is not None and not shown and seen:
        fail(f"{job.job} has no messages of {role!r}; it has some of {', '.join(sorted(seen))}")
    if not shown:
        errors.print(f"{job.job} ({phase_text(job)}) has no messages.")


def _print_end(job: management_pb2.JobInfo) -> None:
    """Prints the end of an ended job, to standard error: programs may read the messages on standard output."""
    if job.phase in ENDED:
        message = f": {safe(on_one_line(job.message))}" if job.message else ""
        errors.print(f"{job.job} has ended ({styled_phase(job)}){message}", soft_wrap=True)


def _kept(cluster: Connection, job: str) -> Iterable[observation_pb2.LogRecord]:
    """The records that management keeps, in the order of time."""
    request = observation_pb2.WatchJobRequest(job=job, kinds=["log"])
    # All at once, since a pager may read the output for longer than the call may take.
    with cluster.answering():
        batches = list(cluster.observation.WatchJob(request, timeout=deadlines.QUERIES.history))
    return sorted(_records(event for batch in batches for event in batch.events), key=lambda record: record.time)


def _followed(cluster: Connection, watch: JobWatch, job: str) -> Iterator[observation_pb2.LogRecord]:
    """The records that management keeps, and new ones, each once, even across restarts of management."""
    request = observation_pb2.WatchJobRequest(job=job, follow=True, kinds=["log"])

    def call() -> "grpc.CallIterator[observation_pb2.JobEvents]":
        return cluster.observation.WatchJob(request)

    def events() -> Iterator[observation_pb2.JobEvent]:
        for batch in watch.responses(call):
            for event in batch.events:
                request.after = event.number
                yield event

    return _records(events())


def _records(events: Iterable[observation_pb2.JobEvent]) -> Iterator[observation_pb2.LogRecord]:
    """The records in events; warns of missing ones, which gaps in the events' numbers reveal."""
    last = 0
    for event in events:
        if event.number > last + 1:
            lost = event.number - last - 1
            messages = "1 message is" if lost == 1 else f"{lost} messages are"
            warn(f"{messages} not kept, from before {_clock(event.log.time)}")
        last = event.number
        yield event.log


def _clock(seconds: float) -> str:
    """Local time to the millisecond. seconds: since 1970."""
    return f"{time.strftime('%H:%M:%S', time.localtime(seconds))}.{int(seconds % 1 * 1000):03d}"


def _line(record: observation_pb2.LogRecord) -> Text:
    style = "red" if record.level >= logging.ERROR else "yellow" if record.level >= logging.WARNING else ""
    level = logging.getLevelName(record.level)
    return Text.assemble(
        (f"{_clock(record.time)} ", "dim"),
        (f"{printable(record.node):{_NODE_WIDTH}} ", "cyan"),
        (f"{level:{_LEVEL_WIDTH}} ", style),
        (printable(record.message), style),
    )
