"""How links come about: one end listens and expects a token, the other dials.

The two ends are told of each other, and of the token, over gRPC. On one host the dialler tries the listener's abstract
Unix socket, which leaves no file behind and which only processes of the same user may use; else it opens a gRPC stream.
"""

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc

from interconnect.links.cancellation import Ending
from interconnect.links.frame import HEADER_BYTES, Frame, FrameError, FrameKind, parse
from interconnect.links.grpc_lane import METHOD, GrpcLink
from interconnect.links.link import Link, LinkLost
from interconnect.links.socket_lane import SocketLink
from interconnect.rpc.server import make_channel
from wsc.v1 import node_pb2

MAX_HELLO_BYTES: Final = 1024
# How long a caller may take to introduce itself, and how long one is kept that nobody expects yet.
HELLO_SECONDS: Final = 5.0
UNCLAIMED_SECONDS: Final = 30.0
MAX_UNCLAIMED: Final = 256
_TOKEN_KEY: Final = "wsc-token"
_NAME_KEY: Final = "wsc-name"


def host_id() -> str:
    """Equal for two processes exactly if they can use each other's abstract sockets: host, user, network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.sha256(f"{boot}/{os.getuid()}/{namespace}".encode()).hexdigest()[:16]


class PendingLink:
    """A link that is expected."""

    def __init__(self, listener: "LinkListener", token: str, name: str) -> None:
        self._listener = listener
        self.token = token
        self.name = name
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._closed = False

    def wait(self, deadline_seconds: float) -> Link:
        """The link, when the peer has dialled; it is the caller's then.

        Raises:
            LinkLost: the peer did not come in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._link is not None or self._closed, max(0.0, deadline_seconds))
            link, self._link = self._link, None
        if link is None:
            self.close()
            raise LinkLost(self.name, f"it did not connect within {deadline_seconds:.0f} s")
        return link

    def close(self) -> None:
        """The link is not wanted any more; one that has come, and that nobody has taken, is closed."""
        self._listener.forget(self.token)
        with self._changed:
            self._closed = True
            link, self._link = self._link, None
            self._changed.notify_all()
        if link is not None:
            link.close()

    def arrive(self, link: Link) -> None:
        """The listener's: the peer is here."""
        with self._changed:
            wanted = not self._closed
            if wanted:
                self._link = link
            self._changed.notify_all()
        if not wanted:
            link.close()


class LinkListener:
    """Takes the links that this process expects, on both lanes."""

    def __init__(self, address: str) -> None:
        """`address` is the host:port of the process's gRPC server, as others reach it."""
        self._address = address
        self._pending: dict[str, PendingLink] = {}
        self._unclaimed: dict[str, tuple[float, socket.socket]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._name = f"waferbox-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._accept, name="link-listener", daemon=True)
        self._thread.start()

    def endpoint(self) -> node_pb2.LinkEndpoint:
        """What a peer needs to dial."""
        return node_pb2.LinkEndpoint(address=self._address, host=host_id(), socket=self._name)

    def add_to_server(self, server: grpc.Server) -> None:
        """Adds the stream of the gRPC lane; before the server starts."""
        handler = grpc.stream_stream_rpc_method_handler(self._serve_stream)
        service, method = METHOD.strip("/").split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))

    def expect(self, token: str, name: str) -> PendingLink:
        """From now on the peer called `name` may come and show this token, once."""
        pending = PendingLink(self, token, name)
        with self._changed:
            assert token not in self._pending, "a token is for one link"
            _, connection = self._unclaimed.pop(token, (0.0, None))
            if connection is None:
                self._pending[token] = pending
            self._changed.notify_all()
        if connection is not None:
            self._hand_over(pending, connection)
        return pending

    def forget(self, token: str) -> None:
        """The token is worth nothing any more."""
        with self._changed:
            self._pending.pop(token, None)

    def close(self) -> None:
        """Takes no links any more; those that were handed over stay."""
        with self._changed:
            self._closed = True
            unclaimed = [connection for _, connection in self._unclaimed.values()]
            self._unclaimed.clear()
            self._changed.notify_all()
        _shut(self._socket)  # wakes the accepting thread
        self._socket.close()
        self._thread.join()
        for connection in unclaimed:
            connection.close()

    # -- the lane within one host

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            try:
                token = self._greet(connection)
            except (OSError, FrameError, UnicodeDecodeError):
                connection.close()
                continue
            with self._changed:
                pending = self._pending.pop(token, None)
                if pending is None:
                    self._keep_unclaimed(token, connection)
            if pending is not None:
                self._hand_over(pending, connection)

    def _greet(self, connection: socket.socket) -> str:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            raise FrameError("the caller is another user's")
        connection.settimeout(HELLO_SECONDS)
        frame, payload = parse(connection.recv(HEADER_BYTES + MAX_HELLO_BYTES))
        if frame.kind is not FrameKind.HELLO:
            raise FrameError("the caller does not introduce itself")
        return bytes(payload).decode()

    def _keep_unclaimed(self, token: str, connection: socket.socket) -> None:
        """The peer may be told of the link before this end is."""
        now = time.monotonic()
        for old, (since, waiting) in list(self._unclaimed.items()):
            if now - since > UNCLAIMED_SECONDS:
                waiting.close()
                del self._unclaimed[old]
        if self._closed or token in self._unclaimed or len(self._unclaimed) >= MAX_UNCLAIMED:
            connection.close()
            return
        self._unclaimed[token] = (now, connection)

    def _hand_over(self, pending: PendingLink, connection: socket.socket) -> None:
        try:
            connection.send(Frame(FrameKind.HELLO).header())
        except OSError:
            connection.close()
            return
        pending.arrive(SocketLink(pending.name, connection))

    # -- the lane between hosts

    def _serve_stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        metadata = dict(context.invocation_metadata())
        token = str(metadata.get(_TOKEN_KEY, ""))
        with self._changed:
            self._changed.wait_for(lambda: self._closed or token in self._pending, UNCLAIMED_SECONDS)
            pending = self._pending.pop(token, None)
        if pending is None:
            caller = metadata.get(_NAME_KEY, "")
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"nobody expects a link from {caller!r}")
        link = GrpcLink(pending.name, abandon=context.cancel)
        context.add_callback(link.end_outgoing)
        link.read_from(messages)
        pending.arrive(link)
        yield Frame(FrameKind.HELLO).header()
        yield from link.outgoing()


def dial(
    endpoint: node_pb2.LinkEndpoint,
    token: str,
    *,
    name: str,
    own_name: str,
    lane: "node_pb2.Lane.ValueType",
    deadline_seconds: float,
    ending: Ending | None = None,
) -> Link:
    """Opens the link that the peer called `name` expects.

    Args:
        own_name: what the peer may call this process where it refuses the link.
        lane: a lane, or LANE_UNSPECIFIED for shared memory where it is possible, else gRPC.
        ending: of the job that wants the link.

    Raises:
        LinkLost: the peer cannot be reached, does not expect the link, or the wanted lane is not possible; or the
            job ends.
    """
    ending = ending or Ending()
    deadline = time.monotonic() + deadline_seconds
    if lane != node_pb2.LANE_GRPC and endpoint.socket and endpoint.host == host_id():
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(max(0.001, deadline_seconds))
        try:
            connection.connect(f"\0{endpoint.socket}")
        except OSError as error:
            connection.close()
            if lane == node_pb2.LANE_SHARED_MEMORY:
                raise LinkLost(name, f"it cannot be reached ({error})") from error
        else:
            with ending.ends(lambda: _shut(connection)):
                return _introduce(connection, token, name)
    elif lane == node_pb2.LANE_SHARED_MEMORY:
        raise LinkLost(name, "it is on another host, where shared memory cannot be used; choose the gRPC lane")
    return _dial_grpc(endpoint, token, name, own_name, deadline - time.monotonic(), ending)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _introduce(connection: socket.socket, token: str, name: str) -> Link:
    try:
        payload = memoryview(token.encode())
        connection.sendmsg((Frame(FrameKind.HELLO, length=len(payload)).header(payload), payload))
        answer = connection.recv(HEADER_BYTES)
        if not answer or parse(answer)[0].kind is not FrameKind.HELLO:
            raise LinkLost(name, "it does not expect the link")
    except (OSError, FrameError) as error:
        connection.close()
        if isinstance(error, LinkLost):
            raise
        raise LinkLost(name, f"it does not answer ({error})") from error
    return SocketLink(name, connection)


def _dial_grpc(
    endpoint: node_pb2.LinkEndpoint, token: str, name: str, own_name: str, deadline_seconds: float, ending: Ending
) -> Link:
    channel = make_channel(endpoint.address)

    def abandon() -> None:
        channel.close()  # cancels the stream

    link = GrpcLink(name, abandon)
    stream = channel.stream_stream(METHOD, request_serializer=None, response_deserializer=None)
    call = stream(link.outgoing(), metadata=((_TOKEN_KEY, token), (_NAME_KEY, own_name)), wait_for_ready=True)
    greeting = _Greeting(iter(call))
    link.read_from(greeting.messages())
    with ending.ends(greeting.give_up):
        welcome = greeting.wait(deadline_seconds)
    if not welcome:
        call.cancel()  # type: ignore[no-untyped-call]
        link.close()
        reason = f"it did not answer within {deadline_seconds:.0f} s" if greeting.error is None else greeting.error
        raise LinkLost(name, reason)
    return link


class _Greeting:
    """The first message of a stream, which says that the other side has the link."""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self._decided = threading.Event()
        self._welcome = False
        self.error: str | None = None

    def messages(self) -> Iterator[bytes]:
        """All messages behind the first."""
        try:
            for message in self._messages:
                self._welcome = parse(message)[0].kind is FrameKind.HELLO
                break
        except (grpc.RpcError, FrameError) as error:
            self.error = error.details() if isinstance(error, grpc.Call) else str(error)
        finally:
            self._decided.set()
        if self._welcome:
            yield from self._messages

    def give_up(self) -> None:
        """Have wait return."""
        self._decided.set()

    def wait(self, deadline_seconds: float) -> bool:
        """Whether the other side has greeted."""
        return self._decided.wait(max(0.0, deadline_seconds)) and self._welcome
