"""The dialling end of a link: it uses the listener's Unix socket within a host, and a gRPC stream between hosts."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import grpc

from waferbox.host.threads import CancellationToken
from waferbox.links.frame import FrameError
from waferbox.links.grpc_lane import METHOD, GrpcLink
from waferbox.links.handshake import (
    MAX_HELLO_BYTES,
    NAME_KEY,
    PROOF_KEY,
    dialler_proof,
    hello,
    is_accepting,
    is_same_user,
)
from waferbox.links.link import Link, LinkLost
from waferbox.links.socket_lane import SocketLink
from waferbox.links.socket_names import own_directory
from waferbox.rpc.server import make_channel
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import node_pb2


def dial(
    endpoint: node_pb2.LinkEndpoint,
    token: str,
    *,
    name: str,
    own_name: str,
    lane: "node_pb2.Lane.ValueType",
    deadline_seconds: float,
    cancellation: CancellationToken | None = None,
    credential: str | None = None,
) -> Link:
    """Opens the link that a peer expects.

    Args:
        endpoint: where the peer listens.
        token: the token of the link, which the peer has too.
        name: the peer, in messages.
        own_name: this process, in the peer's message where it refuses the link.
        lane: a lane, or LANE_UNSPECIFIED for shared memory where possible, else gRPC.
        deadline_seconds: for the whole call.
        cancellation: of the job that the link is for.
        credential: the cluster's token that a gRPC stream bears; None: that of a node.

    Raises:
        LinkLost: the peer cannot be reached or does not expect the link, the lane is not possible, or the job ends.
    """
    cancellation = cancellation or CancellationToken()
    deadline = time.monotonic() + deadline_seconds
    if lane != node_pb2.LANE_GRPC and endpoint.socket and endpoint.host == (directory := own_directory()).host:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(max(0.001, deadline_seconds))
        try:
            connection.connect(directory.address(endpoint.socket))
        except OSError as error:
            connection.close()
            if lane == node_pb2.LANE_SHARED_MEMORY:
                raise LinkLost(name, f"it cannot be reached ({error})") from error
        else:
            with cancellation.on_cancel(lambda: _shut_down(connection)):
                return _introduce(connection, token, name)
    elif lane == node_pb2.LANE_SHARED_MEMORY:
        raise LinkLost(name, "it is on another host, where shared memory cannot be used; choose the gRPC lane")
    return _dial_grpc(endpoint, token, name, own_name, deadline - time.monotonic(), cancellation, credential)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _introduce(connection: socket.socket, token: str, name: str) -> Link:
    try:
        if not is_same_user(connection):
            raise LinkLost(name, "a process of another user listens in its place")
        connection.sendmsg(hello(token))
        answer = connection.recv(MAX_HELLO_BYTES)
        if not answer:
            raise LinkLost(name, "it does not expect the link")
        if not is_accepting(answer, token):
            raise LinkLost(name, "the process that listens in its place does not have the link's token")
    except (OSError, FrameError) as error:
        connection.close()
        if isinstance(error, LinkLost):
            raise
        raise LinkLost(name, f"it does not answer ({error})") from error
    return SocketLink(name, connection)


def _dial_grpc(
    endpoint: node_pb2.LinkEndpoint,
    token: str,
    name: str,
    own_name: str,
    deadline_seconds: float,
    cancellation: CancellationToken,
    credential: str | None,
) -> Link:
    channel = make_channel(endpoint.address, cluster_secret().token(Kind.NODE) if credential is None else credential)

    def abandon() -> None:
        channel.close()  # cancels the stream

    link = GrpcLink(name, abandon)
    stream = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
    call = stream(
        link.outgoing(), metadata=((PROOF_KEY, dialler_proof(token)), (NAME_KEY, own_name)), wait_for_ready=True
    )
    greeting = _Greeting(iter(call), token)
    link.read_from(greeting.messages())
    with cancellation.on_cancel(greeting.give_up):
        acceptance = greeting.wait(deadline_seconds)
    if not acceptance:
        call.cancel()  # type: ignore[no-untyped-call]
        link.close()
        reason = f"it did not answer within {deadline_seconds:.0f} s" if greeting.error is None else greeting.error
        raise LinkLost(name, reason)
    return link


class _Greeting:
    """The first message of a stream, by which the listener accepts the link. One thread reads it, another waits."""

    def __init__(self, messages: Iterator[bytes], token: str) -> None:
        self._messages = messages
        self._token = token
        self._decided = threading.Event()
        self._accepted = False
        self.error: str | None = None

    def messages(self) -> Iterator[bytes]:
        """All messages after the first."""
        try:
            for message in self._messages:
                self._accepted = is_accepting(message, self._token)
                break
        except (grpc.RpcError, FrameError) as error:
            self.error = error.details() if isinstance(error, grpc.Call) else str(error)
        finally:
            self._decided.set()
        if self._accepted:
            yield from self._messages

    def give_up(self) -> None:
        """Makes `wait` return."""
        self._decided.set()

    def wait(self, deadline_seconds: float) -> bool:
        """Whether the listener has accepted the link within the deadline."""
        return self._decided.wait(max(0.0, deadline_seconds)) and self._accepted
