"""Channels to servers of the cluster that answer."""

import logging

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cstorch.errors import ClusterUnreachableError
from waferbox import deadlines
from waferbox.rpc.listening import open_connection, other_listener
from waferbox.rpc.server import make_channel

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # which each server of HTTP/2 answers at once
_PREFACE_SECONDS = 1.0

logger = logging.getLogger("cstorch.cluster")


def connect(address: str, what: str, token: str, *, silent_seconds: float = 0.0) -> grpc.Channel:
    """Returns a channel to a server that answers.

    Args:
        address: Host and port.
        what: The kind of the server, for the error.
        token: The token of all calls.
        silent_seconds: How much longer a process is waited for that listens there and says nothing: it may be stopped,
            or busy.

    Raises:
        ClusterUnreachableError: Within deadlines.JOB_CREATION.connect nothing answers, or no gRPC server does.
    """
    channel = make_channel(address, token)
    try:
        answered = _answers(channel, deadlines.JOB_CREATION.connect)
        if not answered and silent_seconds and _is_silent(address):
            logger.info("The %s at %s does not answer: waiting up to %g s for it", what, address, silent_seconds)
            answered = _answers(channel, silent_seconds)
    except BaseException:
        channel.close()
        raise
    if not answered:
        channel.close()
        if other := other_listener(address, what):
            raise ClusterUnreachableError(other)
        raise ClusterUnreachableError(
            f"no {what} answers at {address} within {deadlines.JOB_CREATION.connect:g} s: check the address, and that "
            "the cluster is up (`waferbox status`, `waferbox up`)"
        )
    return channel


def _answers(channel: grpc.Channel, seconds: float) -> bool:
    """Whether a gRPC server answers in time, with whatever status."""
    # Not by grpc.channel_ready_future: it leaves a thread behind, for which closing the channel waits 0.2 s.
    try:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True)
    except grpc.RpcError as error:
        return error.code() != grpc.StatusCode.DEADLINE_EXCEEDED
    return True


def _is_silent(address: str) -> bool:
    """Whether a process accepts connections at host:port, and says nothing, as one that is stopped."""
    try:
        with open_connection(address) as connection:
            connection.sendall(_PREFACE)
            connection.settimeout(_PREFACE_SECONDS)
            connection.recv(1)
    except TimeoutError:
        return True
    except OSError:
        pass
    return False
