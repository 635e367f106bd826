"""How a command reaches a cluster, finds the job that it names, and watches that job."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Final, Never, TypeVar

import grpc
import typer

from waferbox import deadlines, settings
from waferbox.cluster.local_clusters import LocalCluster, last_failure, local_clusters
from waferbox.output.console import Status, fail, warn
from waferbox.output.tables import phase_text
from waferbox.rpc.address import split_address
from waferbox.rpc.server import is_from_ingress, make_channel
from waferbox.security.tokens import Kind, own_clusters_token
from wsc.v1 import management_pb2, management_pb2_grpc, observation_pb2_grpc

# ----------------------------------------------------------------------------------------------------------------------
# The cluster that a command speaks with: which it is, what it is asked, and what its answers mean for the command


ManagementOption = Annotated[
    str | None,
    typer.Option(
        "--management",
        envvar=settings.MANAGEMENT.name,
        metavar="HOST:PORT",
        help=r"The management service.  \[default: the cluster that `waferbox up` started]",
    ),
]

_REFUSALS: Final = {
    grpc.StatusCode.NOT_FOUND: Status.NO_JOB,
    grpc.StatusCode.INVALID_ARGUMENT: Status.USAGE,
    grpc.StatusCode.FAILED_PRECONDITION: Status.FAILED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Status.FAILED,
    grpc.StatusCode.ABORTED: Status.FAILED,
    grpc.StatusCode.UNAUTHENTICATED: Status.FAILED,
    grpc.StatusCode.PERMISSION_DENIED: Status.FAILED,
}


class WatchLost(Exception):
    """What a command watched has gone, and does not come back."""

    def __init__(self, message: str, status: Status) -> None:
        """status: what the command exits with."""
        super().__init__(message)
        self.status = status


class Connection:
    """The services of a cluster at an address."""

    def __init__(self, address: str, channel: grpc.Channel) -> None:
        self.address = address
        self.management = management_pb2_grpc.ManagementStub(channel)
        self.observation = observation_pb2_grpc.ObservationStub(channel)

    def list_nodes(self) -> management_pb2.ListNodesResponse:
        return self.management.ListNodes(management_pb2.ListNodesRequest(), timeout=deadlines.QUERIES.command)

    def nodes(self) -> list[management_pb2.NodeInfo]:
        return list(self.list_nodes().nodes)

    def jobs(self) -> list[management_pb2.JobInfo]:
        """Newest first, those that ended last."""
        return list(self.management.ListJobs(management_pb2.ListJobsRequest(), timeout=deadlines.QUERIES.command).jobs)

    def job(self, name: str) -> management_pb2.JobInfo:
        """A job by its whole name, as it is now."""
        return self.management.GetJob(management_pb2.GetJobRequest(job=name), timeout=deadlines.QUERIES.command).job


@contextlib.contextmanager
def connect(management: str | None) -> Iterator[Connection]:
    """A connection to the cluster that is meant. A call that fails in the context, or WatchLost, ends the command."""
    address, own = find_cluster(management)
    with make_channel(address, None if own is None else own_clusters_token(Kind.ADMIN)) as channel:
        try:
            yield Connection(address, channel)
        except grpc.RpcError as error:
            _end(address, error)
        except WatchLost as error:
            fail(str(error), error.status)


def find_cluster(management: str | None) -> tuple[str, LocalCluster | None]:
    """The address of the cluster that is meant, and the note of it if it was started here."""
    known = local_clusters()
    if management is not None:
        address = checked_address(management)
        return address, next((cluster for cluster in known if cluster.management == address), None)
    if not known:
        fail(
            "no cluster is up that `waferbox up` started here; start one, or name another with --management HOST:PORT "
            f"(or {settings.MANAGEMENT.name}).{_failure_text()}"
        )
    if len(known) > 1:
        addresses = ", ".join(cluster.management for cluster in known)
        fail(f"several clusters are up ({addresses}): say which with --management HOST:PORT")
    if known[0].tls:
        os.environ.setdefault(settings.TLS_DIR.name, known[0].tls)
    return known[0].management, known[0]


def _failure_text(address: str | None = None) -> str:
    """How the last cluster failed that was started here, if it did, and had this address."""
    failure = last_failure()
    if failure is None or address not in (None, failure.management):
        return ""
    return f" The cluster at {failure.management} ended: {failure.cause}"


def checked_address(value: str, *, any_port: bool = False) -> str:
    """The same; raises typer.BadParameter."""
    try:
        split_address(value, any_port=any_port)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return value


def _end(address: str, error: grpc.RpcError) -> Never:
    assert isinstance(error, grpc.Call)
    if error.code() in _REFUSALS:
        fail(error.details() or error.code().name, _REFUSALS[error.code()])
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        fail(f"{address} did not answer in time")
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        fail(f"what answers at {address} is not a management service of this version")
    if is_from_ingress(error):
        fail(error.details() or error.code().name)
    tls = f"does {settings.TLS_DIR.name} name its certificates if it has some"
    question = f"is the cluster up, is this its address, and {tls}?"
    fail(f"no management service answers at {address}; {question}{_failure_text(address)}")


# --- Names of jobs, as one types them: whole, or so much of them that no other begins with it -------------------------


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
        jobs = stub.ListJobs(management_pb2.ListJobsRequest(), timeout=deadlines.QUERIES.completion).jobs
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

# ----------------------------------------------------------------------------------------------------------------------
# Watching a job across restarts of the management service, which the job outlives: the stream is opened anew


RETRY_SECONDS: Final = 0.5

_BROKEN: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
_AWAY: Final = _BROKEN | {grpc.StatusCode.DEADLINE_EXCEEDED}

T = TypeVar("T")


class JobWatch:
    """Watches one job. responses() is for one thread; job() and close() are for any."""

    def __init__(self, cluster: Connection, job: management_pb2.JobInfo) -> None:
        self._cluster = cluster
        self._job = job
        self._lock = threading.Lock()
        self._stream: grpc.RpcContext | None = None
        self._over = threading.Event()
        self._settled_at = 0.0  # when all of the job should be back

    def responses(self, call: "Callable[[], grpc.CallIterator[T]]") -> Iterator[T]:
        """Those of a call, which is made anew when management was away. Ends with the call, or after close.

        Says on standard error that management is away, and that it is back. Raises WatchLost if it does not come back,
        or comes back without the job, and grpc.RpcError for what else goes wrong.
        """
        while True:
            stream = call()
            with self._lock:
                self._stream = stream
                if self._over.is_set():
                    stream.cancel()  # type: ignore[no-untyped-call]
            try:
                yield from stream
                return
            except grpc.RpcError as error:
                if self._over.is_set():
                    return
                code = _code(error)
                if code == grpc.StatusCode.FAILED_PRECONDITION and time.monotonic() < self._settled_at:
                    self._over.wait(RETRY_SECONDS)
                elif code in _BROKEN:
                    self._wait_for_return()
                else:
                    raise

    def job(self) -> management_pb2.JobInfo:
        """The job as it is now; as it was last, while management is away."""
        try:
            self._job = self._cluster.job(self._job.job)
        except grpc.RpcError as error:
            if _code(error) not in _AWAY | {grpc.StatusCode.NOT_FOUND}:
                raise
        return self._job

    def close(self) -> None:
        """Have responses() end."""
        with self._lock:
            self._over.set()
            if self._stream is not None:
                self._stream.cancel()  # type: ignore[no-untyped-call]

    def _wait_for_return(self) -> None:
        """Until management answers again, and knows the job. Raises WatchLost."""
        named = f"the management service at {self._cluster.address}"
        seconds = deadlines.QUERIES.management_away
        warn(f"{named} is away; waiting for it, {seconds:g} s at most")
        began, back = time.monotonic(), None
        while not self._over.wait(RETRY_SECONDS):
            now = time.monotonic()
            try:
                self._job = self._cluster.job(self._job.job)
            except grpc.RpcError as error:
                code = _code(error)
                if code in _AWAY:
                    back = None
                    if now - began > seconds:
                        raise WatchLost(f"{named} did not come back within {seconds:g} s", Status.AWAY) from error
                elif code == grpc.StatusCode.NOT_FOUND:
                    back = back or now
                    if now - back > deadlines.QUERIES.job_unknown:
                        raise WatchLost(
                            f"{named} is back, but does not know {self._job.job}: the job ended meanwhile, or its "
                            "coordinator ended with the service",
                            Status.NO_JOB,
                        ) from error
                else:
                    raise
            else:
                self._settled_at = now + deadlines.QUERIES.job_unknown
                warn(f"it is back, after {now - began:.0f} s")
                return


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    assert isinstance(error, grpc.Call)
    return error.code()
