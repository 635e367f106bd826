"""`waferbox logs`: what the processes of a job said."""

import logging
import time
from collections.abc import Iterator
from typing import Annotated, Final

import typer
from rich.text import Text

from waferbox.connection import Connection, ManagementOption, connected
from waferbox.console import errors, fail, output, printable
from waferbox.job_names import ENDED, JobArgument, find_job
from waferbox.tables import phase_text, safe, styled_phase
from wsc.v1 import management_pb2, observation_pb2

KEPT_SECONDS: Final = 30.0  # until all that is kept of a job has come

_NODE_WIDTH: Final = 11  # "coordinator"
_LEVEL_WIDTH: Final = 7  # "WARNING"


def logs(
    name: JobArgument,
    role: Annotated[
        str | None, typer.Option(metavar="ROLE", help="Only of one process (wafer-0), or of a role (wafer).")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    management: ManagementOption = None,
) -> None:
    """Show what the processes of a job said, oldest first, as far as the management service keeps it."""
    seen: set[str] = set()
    shown = False
    with connected(management) as cluster:
        job = find_job(cluster.jobs(), name)
        _tell_end(job)
        for record in _records(cluster, job.job, follow):
            seen.add(record.node)
            if role in (None, record.node, record.node.rpartition("-")[0]):
                shown = True
                output.print(_line(record), soft_wrap=True)
        if job.phase not in ENDED:
            job = cluster.job(job.job)
            _tell_end(job)
    if role is not None and not shown and seen:
        fail(f"{job.job} has no messages of {role!r}; it has some of {', '.join(sorted(seen))}")
    if not shown:
        errors.print(f"{job.job} ({phase_text(job)}) has no messages.")


def _tell_end(job: management_pb2.JobInfo) -> None:
    """The line that matters most: why there is no more. Beside the messages, which a program may read."""
    if job.phase in ENDED:
        message = f": {safe(job.message.strip())}" if job.message else ""
        errors.print(f"{job.job} has ended ({styled_phase(job)}){message}", soft_wrap=True)


def _records(cluster: Connection, job: str, follow: bool) -> Iterator[observation_pb2.LogRecord]:
    request = observation_pb2.WatchJobRequest(job=job, follow=follow, kinds=["log"])
    stream = cluster.observation.WatchJob(request, timeout=None if follow else KEPT_SECONDS)
    records = (event.log for events in stream for event in events.events)
    # What is kept is taken whole before it is shown: who reads it, in a pager, may take longer than the deadline.
    return records if follow else iter(sorted(records, key=lambda record: record.time))


def _line(record: observation_pb2.LogRecord) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(record.time))
    style = "red" if record.level >= logging.ERROR else "yellow" if record.level >= logging.WARNING else ""
    level = logging.getLevelName(record.level)
    return Text.assemble(
        (f"{clock}.{int(record.time % 1 * 1000):03d} ", "dim"),
        (f"{printable(record.node):{_NODE_WIDTH}} ", "cyan"),
        (f"{level:{_LEVEL_WIDTH}} ", style),
        (printable(record.message), style),
    )
