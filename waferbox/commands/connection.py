"""The connection of a command to a cluster, names of jobs on the command line, and streams that follow a job."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Final, Never, TypeGuard, TypeVar

import grpc
import typer

from waferbox import deadlines, settings
from waferbox.launch.local_clusters import (
    EMBEDDED,
    LocalCluster,
    for_everybody,
    last_failure,
    listed,
    local_clusters,
    with_name,
)
from waferbox.output.console import Status, fail, warn
from waferbox.output.tables import phase_text
from waferbox.output.working import Working, working
from waferbox.rpc.address import split_address
from waferbox.rpc.listening import other_listener
from waferbox.rpc.server import is_from_ingress, make_channel
from waferbox.security.tokens import Kind, command_token, own_clusters_token
from wsc.v1 import management_pb2, management_pb2_grpc, observation_pb2_grpc

# --- The cluster ------------------------------------------------------------------------------------------------------


ManagementOption = Annotated[
    str | None,
    typer.Option(
        "--management",
        envvar=settings.MANAGEMENT.name,
        metavar="HOST:PORT|NAME",
        help=r"The management service, or the name of a cluster of this machine.  \[default: the cluster that "
        "`waferbox up` started, or the only one]",
    ),
]

# Of the servers of a user's clusters; where a port is taken, the next one that is free is used.
DEFAULT_LISTEN: Final = "127.0.0.1:9000"
DEFAULT_PAGE: Final = "127.0.0.1:9080"

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
    """Raised when a job cannot be followed any more: management, or the job, did not return."""

    def __init__(self, message: str, status: Status) -> None:
        """status: the exit status of the command."""
        super().__init__(message)
        self.status = status


class Connection:
    """The services of the cluster at an address. Thread-safe."""

    def __init__(self, address: str, channel: grpc.Channel, token: str, record: LocalCluster | None) -> None:
        """token: that calls through the channel bear. record: of the cluster, if it was started on this machine."""
        self.address = address
        self.record = record
        self.token = token
        self.management = management_pb2_grpc.ManagementStub(channel)
        self.observation = observation_pb2_grpc.ObservationStub(channel)

    def answering(self) -> contextlib.AbstractContextManager[Working]:
        """Returns the context of a call."""
        return working(f"waiting for the cluster at {self.address}")

    def list_nodes(self) -> management_pb2.ListNodesResponse:
        with self.answering():
            return self.management.ListNodes(management_pb2.ListNodesRequest(), timeout=deadlines.QUERIES.command)

    def nodes(self) -> list[management_pb2.NodeInfo]:
        return list(self.list_nodes().nodes)

    def jobs(self) -> list[management_pb2.JobInfo]:
        """All jobs: live ones, newest first, then ended ones."""
        request = management_pb2.ListJobsRequest()
        with self.answering():
            return list(self.management.ListJobs(request, timeout=deadlines.QUERIES.command).jobs)

    def job(self, name: str) -> management_pb2.JobInfo:
        """The current state of a job, without a sign that it waits: a display may be under way. name: its full name."""
        return self.management.GetJob(management_pb2.GetJobRequest(job=name), timeout=deadlines.QUERIES.command).job


def meant(clusters: Sequence[LocalCluster]) -> Sequence[LocalCluster]:
    """Returns the clusters that a command may mean which names none: one of `waferbox up` before those of scripts."""
    return for_everybody(clusters) or clusters


@contextlib.contextmanager
def connect(
    management: str | None, among: Callable[[Sequence[LocalCluster]], Sequence[LocalCluster]] = meant
) -> Iterator[Connection]:
    """A connection to a cluster; a failed call or WatchLost within the block ends the command.

    Args:
        management: address of the management service, or the name of a cluster of this machine; None: that of
            `waferbox up`, or the only one.
        among: those that may be meant where none is named.
    """
    address, own = find_cluster(management, among)
    # As in scripts, an address gets the token of the environment, and a cluster that is found by its record its own.
    secret_file = "" if own is None else own.secret
    if own is None or _is_address(management):
        token = command_token(address, secret_file)
    else:
        token = own_clusters_token(Kind.ADMIN, secret_file)
    with make_channel(address, token) as channel:
        try:
            yield Connection(address, channel, token, own)
        except grpc.RpcError as error:
            _fail_for(address, error)
        except WatchLost as error:
            fail(str(error), error.status)


def find_cluster(
    management: str | None, among: Callable[[Sequence[LocalCluster]], Sequence[LocalCluster]] = meant
) -> tuple[str, LocalCluster | None]:
    """The address of a cluster, and its record if it was started on this machine.

    Args:
        management: as for connect.
        among: those that may be meant where none is named.
    """
    known = local_clusters()
    if management == EMBEDDED:  # of the environment, for scripts
        management = None
    if _is_address(management):
        address = checked_address(management)
        return address, next((cluster for cluster in known if cluster.management == address), None)
    chosen = among(known) if management is None else with_name(known, management)
    if not chosen and management is not None:
        raise typer.BadParameter(
            f"{management!r} is neither host:port nor the name of a cluster of this machine ({listed(known)})"
        )
    if not chosen:
        fail(
            "no cluster of `waferbox up` runs on this machine; start one, or name another with --management HOST:PORT "
            f"(or {settings.MANAGEMENT.name}).{_failure_text()}"
        )
    if len(chosen) > 1:
        fail(f"several clusters run ({listed(known)}): name one with --management HOST:PORT or --management NAME")
    chosen[0].use_certificates()
    return chosen[0].management, chosen[0]


def _is_address(management: str | None) -> TypeGuard[str]:
    """Whether what names a cluster is an address, and not the name of a cluster of this machine."""
    return management is not None and ":" in management


def _failure_text(address: str | None = None) -> str:
    """A sentence about the failure of this machine's last cluster, if it failed and had this address; else empty."""
    failure = last_failure()
    if failure is None or address not in (None, failure.management):
        return ""
    return f" The cluster at {failure.management} ended: {failure.cause}"


def checked_address(value: str, *, any_port: bool = False) -> str:
    """Returns an address if it is valid, and otherwise raises typer.BadParameter."""
    try:
        split_address(value, any_port=any_port)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return value


def _fail_for(address: str, error: grpc.RpcError) -> Never:
    """Ends the command with the message and the exit status for a failed call."""
    assert isinstance(error, grpc.Call)
    if error.code() in _REFUSALS:
        fail(error.details() or error.code().name, _REFUSALS[error.code()])
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        fail(f"{address} did not answer in time")
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        fail(f"the server at {address} is not a management service of this version")
    if is_from_ingress(error):
        fail(error.details() or error.code().name)
    if other := other_listener(address, "management service"):
        fail(other)
    tls = f"does {settings.TLS_DIR.name} name its certificates, if it uses TLS"
    question = f"is the cluster up, is this its address, and {tls}?"
    fail(f"no management service answers at {address}; {question}{_failure_text(address)}")


# --- Names of jobs ----------------------------------------------------------------------------------------------------


_PREFIX: Final = "job-"
_NAMED: Final = 8  # jobs that a message names at most

ENDED: Final = frozenset(
    {management_pb2.JOB_PHASE_SUCCEEDED, management_pb2.JOB_PHASE_FAILED, management_pb2.JOB_PHASE_CANCELLED}
)


def find_job(jobs: Sequence[management_pb2.JobInfo], name: str) -> management_pb2.JobInfo:
    """The job with this name, or the only one whose name begins so; "job-" may be left out. Else ends the command."""
    stem = name.removeprefix(_PREFIX)
    found = [job for job in jobs if stem and job.job.startswith(f"{_PREFIX}{stem}")]
    exact = [job for job in found if job.job == f"{_PREFIX}{stem}"]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        fail(f"{name!r} may be {_named(found, ' or ')}: write more of the name", Status.NO_JOB)
    known = f"the jobs are {_named(jobs, ', ')}" if jobs else "there are none"
    known += "; `waferbox page` shows the finished jobs of earlier clusters too"
    fail(f"there is no job {name!r}; {known}", Status.NO_JOB)


def _named(jobs: Sequence[management_pb2.JobInfo], separator: str) -> str:
    names = separator.join(job.job for job in jobs[:_NAMED])
    return names + (f" and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else "")


def _complete(context: typer.Context, incomplete: str) -> Iterable[tuple[str, str]]:
    """Completes names of jobs for a shell, with their phases; nothing without a unique cluster."""
    management = context.params.get("management")
    known = local_clusters()
    chosen = with_name(known, management) if management else meant(known)
    addresses = [cluster.management for cluster in chosen] or ([management] if management else [])
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

# --- Streams about a job ----------------------------------------------------------------------------------------------


RETRY_SECONDS: Final = 0.5  # between two attempts to reach management

_BROKEN: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
_AWAY: Final = _BROKEN | {grpc.StatusCode.DEADLINE_EXCEEDED}

T = TypeVar("T")


class JobWatch:
    """A stream about a job, which is opened again after a restart of management, as the job outlives the service.

    `responses` is used by one thread, the other methods by any.
    """

    def __init__(self, cluster: Connection, job: management_pb2.JobInfo) -> None:
        self._cluster = cluster
        self._job = job
        self._lock = threading.Lock()
        self._stream: grpc.RpcContext | None = None
        self._over = threading.Event()
        self._settled_at = 0.0  # until then FAILED_PRECONDITION is retried: the job has not fully returned

    def responses(self, call: "Callable[[], grpc.CallIterator[T]]") -> Iterator[T]:
        """The responses of a streaming call, until it ends or `close` is called.

        Warns when management is unavailable, and repeats the call when it has returned.

        Args:
            call: makes the call.

        Raises:
            WatchLost: management did not return, or returned without the job.
            grpc.RpcError: the call failed for another reason.
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
        """The current state of the job; while management is unavailable, the last known state."""
        try:
            self._job = self._cluster.job(self._job.job)
        except grpc.RpcError as error:
            if _code(error) not in _AWAY | {grpc.StatusCode.NOT_FOUND}:
                raise
        return self._job

    def close(self) -> None:
        """Ends `responses`."""
        with self._lock:
            self._over.set()
            if self._stream is not None:
                self._stream.cancel()  # type: ignore[no-untyped-call]

    def _wait_for_return(self) -> None:
        """Waits until management has returned and has the job. Raises WatchLost."""
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
