"""Names of jobs, as one types them: whole, or so much of them that no other begins with it."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import grpc
import typer

from interconnect.rpc.server import make_channel
from waferbox.cluster.local_clusters import local_clusters
from waferbox.output.console import Status, fail
from waferbox.output.tables import phase_text
from wsc.v1 import management_pb2, management_pb2_grpc

COMPLETION_SECONDS: Final = 1.0
_PREFIX: Final = "job-"
_NAMED: Final = 8  # so many jobs does a message name

ENDED: Final = frozenset(
    {management_pb2.JOB_PHASE_SUCCEEDED, management_pb2.JOB_PHASE_FAILED, management_pb2.JOB_PHASE_CANCELLED}
)


def find_job(jobs: Sequence[management_pb2.JobInfo], name: str) -> management_pb2.JobInfo:
    """The job of which this is the name or its beginning, with or without "job-". Ends the command if none is, or
    several are."""
    stem = name.removeprefix(_PREFIX)
    found = [job for job in jobs if stem and job.job.startswith(f"{_PREFIX}{stem}")]
    exact = [job for job in found if job.job == f"{_PREFIX}{stem}"]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        fail(f"{name!r} may be {_named(found, ' or ')}: write more of the name", Status.NO_JOB)
    there = f"the jobs are {_named(jobs, ', ')}" if jobs else "there are none"
    fail(f"there is no job {name!r}; {there}", Status.NO_JOB)


def _named(jobs: Sequence[management_pb2.JobInfo], separator: str) -> str:
    names = separator.join(job.job for job in jobs[:_NAMED])
    return names + (f" and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else "")


def _complete(context: typer.Context, incomplete: str) -> Iterable[tuple[str, str]]:
    """Names of jobs for a shell, with what each is about; nothing where there is no cluster to ask."""
    management = context.params.get("management")
    addresses = [management] if management else [cluster.management for cluster in local_clusters()]
    if len(addresses) != 1:
        return []
    with make_channel(addresses[0]) as channel, contextlib.suppress(grpc.RpcError):
        stub = management_pb2_grpc.ManagementStub(channel)
        jobs = stub.ListJobs(management_pb2.ListJobsRequest(), timeout=COMPLETION_SECONDS).jobs
        return [(job.job, phase_text(job)) for job in jobs if job.job.startswith(incomplete)]
    return []


JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's name, or its beginning.", autocompletion=_complete)
]
JobArguments = Annotated[
    list[str], typer.Argument(metavar="JOB", help="Jobs' names, or their beginnings.", autocompletion=_complete)
]
OptionalJobArgument = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="A job's name, or its beginning.", autocompletion=_complete),
]
OptionalJobArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="JOB", help="Jobs' names, or their beginnings.", autocompletion=_complete),
]
