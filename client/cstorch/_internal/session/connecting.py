"""Channels to servers of the cluster that answer."""

import socket

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cstorch.errors import ClusterUnreachableError
from waferbox import deadlines, settings
from waferbox.rpc.server import make_channel


def connect(address: str, what: str, token: str) -> grpc.Channel:
    """Returns a channel to a server that answers.

    Args:
        address: Host and port.
        what: The kind of the server, for the error.
        token: The token of all calls.

    Raises:
        ClusterUnreachableError: Within deadlines.JOB_CREATION.connect nothing answers, or no gRPC server does.
    """
    channel = make_channel(address, token)
    try:
        answered = _answers(channel)
    except BaseException:
        channel.close()
        raise
    if not answered:
        channel.close()
        if _listens(address):
            raise ClusterUnreachableError(
                f"what listens at {address} does not answer as a {what} does: check the port, which `waferbox up` "
                f"printed (the page has another); if the cluster uses TLS, {settings.TLS_DIR.name} must name a "
                "folder with its certificates, and else none"
            )
        raise ClusterUnreachableError(
            f"no {what} answers at {address} within {deadlines.JOB_CREATION.connect:g} s: check the address, and that "
            "the cluster is up (`waferbox status`, `waferbox up`)"
        )
    return channel


def _answers(channel: grpc.Channel) -> bool:
    """Whether a gRPC server answers, with whatever status."""
    # Not by grpc.channel_ready_future: it leaves a thread behind, for which closing the channel waits 0.2 s.
    try:
        health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=deadlines.JOB_CREATION.connect, wait_for_ready=True
        )
    except grpc.RpcError as error:
        return error.code() != grpc.StatusCode.DEADLINE_EXCEEDED
    return True


def _listens(address: str) -> bool:
    """Whether any process accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), deadlines.JOB_CREATION.connect).close()
    except OSError:
        return False
    return True
