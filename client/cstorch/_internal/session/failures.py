"""Failures on the cluster, as exceptions for the script."""

import traceback

import grpc

from cstorch.errors import (
    ClusterError,
    ClusterUnreachableError,
    CompileError,
    ConfigurationError,
    CstorchError,
    InputError,
    InternalError,
    JobCancelledError,
    NodeLostError,
    VersionMismatchError,
)
from waferbox.links.link import LinkLost
from waferbox.rpc.server import is_from_ingress, status_of
from waferbox.wire_version import MISMATCH_REMEDY, WIRE_VERSION
from wsc.v1 import node_pb2


def from_failure(failure: node_pb2.Failure) -> CstorchError:
    """Returns the exception for a failure that the cluster reports."""
    text = failure.message or "the cluster gave no reason"
    if failure.node and failure.node not in text:
        text = f"{failure.node}: {text}"
    match failure.kind:
        case node_pb2.Failure.KIND_NODE:
            return NodeLostError(text)
        case node_pb2.Failure.KIND_INPUT:
            trace = f"\n\nThe traceback of the worker:\n{failure.traceback}" if failure.traceback else ""
            return InputError(f"{text}{trace}")
        case node_pb2.Failure.KIND_USER:
            return ClusterError(text)
        case node_pb2.Failure.KIND_CANCELLED:
            return JobCancelledError(failure.message or "the job was cancelled")
    trace = f"\n\nThe traceback of {failure.node or 'the cluster'}:\n{failure.traceback}" if failure.traceback else ""
    return InternalError(f"{text}{trace}")


def from_defect(error: Exception) -> InternalError:
    """Returns the exception for one that only a defect of this package explains."""
    trace = "".join(traceback.format_exception(error))
    return InternalError(f"{type(error).__name__}: {error}\n\nThe traceback of this process:\n{trace}")


def from_error(error: Exception, doing: str) -> CstorchError:
    """Returns the exception for any error of an operation with the job; `doing` as in from_rpc_error."""
    if isinstance(error, CstorchError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc_error(error, doing)
    if isinstance(error, LinkLost):
        return NodeLostError(f"the connection to {error.peer} broke while {doing}")
    return from_defect(error)


def from_rpc_error(error: grpc.RpcError, doing: str) -> CstorchError:
    """Returns the exception for a failed gRPC call; `doing` names the operation, e.g. "compiling the step"."""
    status = status_of(error)
    details = status.details() or "no details"
    match status.code():
        case grpc.StatusCode.UNAVAILABLE:
            return ClusterUnreachableError(f"the connection to the cluster was lost while {doing}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return ClusterUnreachableError(f"the cluster did not answer in time while {doing}")
        case grpc.StatusCode.CANCELLED | grpc.StatusCode.ABORTED:
            if "Channel closed" in details:  # by this process
                return JobCancelledError(f"the backend was closed, or the script ended, while {doing}")
            return JobCancelledError(f"the job was cancelled while {doing}: {details}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return ConfigurationError(details)
        case grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.NOT_FOUND:
            return ClusterError(details)
    return InternalError(f"a call failed with {status.code().name} while {doing}: {details}")


def is_management_away(error: grpc.RpcError) -> bool:
    """Whether an ingress answered, but has no management service to pass the call on to."""
    return status_of(error).code() == grpc.StatusCode.UNAVAILABLE and is_from_ingress(error)


def from_create_job_error(error: grpc.RpcError, management: str) -> CstorchError:
    """Returns the exception for a failed CreateJob call."""
    status = status_of(error)
    code, details = status.code(), status.details() or ""
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return ClusterUnreachableError(
            f"what listens at {management} is no management service, but perhaps another process of the cluster: check "
            "the port, which `waferbox up` printed"
        )
    if is_management_away(error):
        return ClusterUnreachableError(details)
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return ConfigurationError(f"{management} refuses a job to this script: {details}")
    if code == grpc.StatusCode.FAILED_PRECONDITION and "version" in details:
        # A management service of an earlier version may not say all.
        versions = details if WIRE_VERSION in details else f"{details} (this client is version {WIRE_VERSION})"
        return VersionMismatchError(versions if MISMATCH_REMEDY in versions else f"{versions}: {MISMATCH_REMEDY}")
    return from_rpc_error(error, "asking for a job")


def from_compile_error(error: grpc.RpcError) -> CstorchError:
    """Returns the exception for a failed Compile call."""
    status = status_of(error)
    if status.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        return CompileError(status.details() or "the step does not compile")
    return from_rpc_error(error, "compiling the step")
