"""Commands that change a job: `waferbox cancel`, `label`, `set-priority`."""

import re
from typing import Annotated

import typer

from waferbox import deadlines
from waferbox.commands.connection import ENDED, JobArgument, JobArguments, ManagementOption, connect, find_job
from waferbox.output.console import fail, print_text
from waferbox.output.tables import phase_text, step_text
from wsc.v1 import management_pb2


def cancel(names: JobArguments, management: ManagementOption = None) -> None:
    """End jobs. Their scripts raise an error; states that no checkpoint contains are lost."""
    with connect(management) as cluster:
        jobs = cluster.jobs()
        chosen = [find_job(jobs, name) for name in names]
        for job in chosen:
            if job.phase in ENDED:
                continue
            with cluster.answering():
                cluster.management.CancelJob(
                    management_pb2.CancelJobRequest(job=job.job), timeout=deadlines.QUERIES.command
                )
            at = f" at step {step_text(job)}" if job.num_steps else ""
            print_text(f"{job.job} is cancelled (it was {phase_text(job)}{at})")
    ended = [f"{job.job} has ended before ({phase_text(job)})" for job in chosen if job.phase in ENDED]
    if ended:
        fail("; ".join(ended))


def label(
    name: JobArgument,
    labels: Annotated[list[str], typer.Argument(metavar="KEY=VALUE|KEY-", help="Labels to set; KEY- removes one.")],
    management: ManagementOption = None,
) -> None:
    """Set and remove labels of a job, live or ended."""
    removed = [text[:-1] for text in labels if text.endswith("-") and "=" not in text]
    added = [text for text in labels if "=" in text]
    wrong = [text for text in labels if "=" not in text and not text.endswith("-")]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is neither KEY=VALUE nor KEY-")
    with connect(management) as cluster:
        job = find_job(cluster.jobs(), name)
        request = management_pb2.LabelJobRequest(job=job.job, add=added, remove=removed)
        with cluster.answering():
            now = cluster.management.LabelJob(request, timeout=deadlines.QUERIES.command).labels
    print_text(f"{job.job} has the labels {' '.join(now)}" if now else f"{job.job} has no labels")


def _priority(text: str) -> int:
    match = re.fullmatch("p?([1-3])", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is none: 1 (first) to 3, or p1 to p3")
    return int(match[1])


def set_priority(
    name: JobArgument,
    priority: Annotated[
        int, typer.Argument(metavar="PRIORITY", parser=_priority, help="1 (first) to 3, or p1 to p3 as in a script.")
    ],
    management: ManagementOption = None,
) -> None:
    """Change the priority of a job, and so its place in the queue. A job that has its nodes keeps them."""
    with connect(management) as cluster:
        before = find_job(cluster.jobs(), name)
        request = management_pb2.SetPriorityRequest(job=before.job, priority=priority)
        with cluster.answering():
            cluster.management.SetPriority(request, timeout=deadlines.QUERIES.command)
            job = cluster.job(before.job)
    place = f"; place {job.queue_position} in the queue" if job.queue_position else ""
    print_text(f"{job.job} has priority {job.priority} (it was {before.priority}){place}")
