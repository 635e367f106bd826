"""The cluster that a command speaks with: which it is, what it is asked, and what its answers mean for the command."""

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated, Final, Never

import grpc
import typer

from interconnect.rpc.address import split_address
from interconnect.rpc.server import is_from_ingress, make_channel
from interconnect.security.own_tokens import own_clusters_token
from interconnect.security.tls import TLS_VARIABLE
from interconnect.security.tokens import Kind
from waferbox.cluster.local_clusters import LocalCluster, last_failure, local_clusters
from waferbox.output.console import Status, fail
from wsc.v1 import management_pb2, management_pb2_grpc, observation_pb2_grpc

MANAGEMENT_VARIABLE: Final = "WAFERBOX_MANAGEMENT"
CALL_SECONDS: Final = 4.0

ManagementOption = Annotated[
    str | None,
    typer.Option(
        "--management",
        envvar=MANAGEMENT_VARIABLE,
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
        return self.management.ListNodes(management_pb2.ListNodesRequest(), timeout=CALL_SECONDS)

    def nodes(self) -> list[management_pb2.NodeInfo]:
        return list(self.list_nodes().nodes)

    def jobs(self) -> list[management_pb2.JobInfo]:
        """Newest first, those that ended last."""
        return list(self.management.ListJobs(management_pb2.ListJobsRequest(), timeout=CALL_SECONDS).jobs)

    def job(self, name: str) -> management_pb2.JobInfo:
        """A job by its whole name, as it is now."""
        return self.management.GetJob(management_pb2.GetJobRequest(job=name), timeout=CALL_SECONDS).job


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
            f"(or {MANAGEMENT_VARIABLE}).{_failure_text()}"
        )
    if len(known) > 1:
        addresses = ", ".join(cluster.management for cluster in known)
        fail(f"several clusters are up ({addresses}): say which with --management HOST:PORT")
    if known[0].tls:
        os.environ.setdefault(TLS_VARIABLE, known[0].tls)
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
    question = f"is the cluster up, is this its address, and does {TLS_VARIABLE} name its certificates if it has some?"
    fail(f"no management service answers at {address}; {question}{_failure_text(address)}")
