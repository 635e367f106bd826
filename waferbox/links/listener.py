"""The listening end of a link: it expects a peer with a token, on either lane.

Both ends get each other's address and the token over gRPC. Within a host the dialler tries the listener's Unix socket,
which only processes of the same user may use; otherwise it opens a gRPC stream.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

import grpc

from waferbox import deadlines
from waferbox.links.accept_loop import AcceptLoop
from waferbox.links.grpc_lane import METHOD, GrpcLink
from waferbox.links.handshake import NAME_KEY, PROOF_KEY, acceptance, dialler_proof
from waferbox.links.link import Link, LinkLost
from waferbox.links.socket_lane import SocketLink
from wsc.v1 import node_pb2

MAX_UNCLAIMED: Final = 256


class PendingLink:
    """A link that the listener expects. Thread-safe."""

    def __init__(self, listener: "LinkListener", token: str, name: str) -> None:
        self._listener = listener
        self.token = token
        self.name = name
        self._changed = threading.Condition()
        self._link: Link | None = None
        self._closed = False
        self._defect: Exception | None = None

    def wait(self, deadline_seconds: float) -> Link:
        """Waits for the peer, and returns the link, which the caller then owns.

        Raises:
            LinkLost: the peer has not dialled in time.
            RuntimeError: the listener has a defect, which is the cause of the error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._link is not None or self._closed, max(0.0, deadline_seconds))
            link, self._link = self._link, None
        if link is None:
            self.close()
            if self._defect is not None:
                raise RuntimeError(f"no link from {self.name} can be taken") from self._defect
            raise LinkLost(self.name, f"it did not connect within {deadline_seconds:.0f} s")
        return link

    def close(self) -> None:
        """Stops expecting the link; closes it if it has arrived and was not returned by `wait`."""
        self._listener.forget(self.token)
        with self._changed:
            self._closed = True
            link, self._link = self._link, None
            self._changed.notify_all()
        if link is not None:
            link.close()

    def arrive(self, link: Link) -> None:
        """Called by the listener when the peer has dialled."""
        with self._changed:
            is_expected = not self._closed
            if is_expected:
                self._link = link
            self._changed.notify_all()
        if not is_expected:
            link.close()

    def fail(self, defect: Exception) -> None:
        """Called by the listener when a defect has ended it."""
        with self._changed:
            self._defect = defect
            self._closed = True
            self._changed.notify_all()


class LinkListener:
    """The links that this process expects, on both lanes. Thread-safe."""

    def __init__(self, address: str, on_defect: Callable[[Exception], None]) -> None:
        """Begins to listen.

        Args:
            address: the host:port at which others reach the gRPC server of the process.
            on_defect: called in a thread of the listener when a defect has ended it.
        """
        self._address = address
        self._on_defect = on_defect
        self._pending: dict[str, PendingLink] = {}  # by the peer's proof
        self._unclaimed: dict[str, tuple[float, socket.socket]] = {}  # by the peer's proof: arrival, connection
        self._changed = threading.Condition()
        self._closed = False
        self._defect: Exception | None = None
        self._callers = AcceptLoop(self._take, self._fail)

    def endpoint(self) -> node_pb2.LinkEndpoint:
        """The addresses that a peer dials."""
        return node_pb2.LinkEndpoint(address=self._address, host=self._callers.host, socket=self._callers.name)

    def add_to_server(self, server: grpc.Server) -> None:
        """Adds the stream of the gRPC lane to a server that has not started yet."""
        handler = grpc.stream_stream_rpc_method_handler(self._serve_stream)
        service, method = METHOD.strip("/").split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))

    def expect(self, token: str, name: str) -> PendingLink:
        """Expects one link of the peer called `name`, which has to prove that it knows the token."""
        pending = PendingLink(self, token, name)
        proof = dialler_proof(token)
        with self._changed:
            assert proof not in self._pending, "a token is for one link"
            defect = self._defect
            _, connection = self._unclaimed.pop(proof, (0.0, None))
            if connection is None:
                self._pending[proof] = pending
            self._changed.notify_all()
        if connection is not None:
            self._hand_over(pending, connection)
        elif defect is not None:
            pending.fail(defect)
        return pending

    def forget(self, token: str) -> None:
        """Refuses the token from now on."""
        with self._changed:
            self._pending.pop(dialler_proof(token), None)

    def close(self) -> None:
        """Takes no more links; those that were handed over stay open."""
        with self._changed:
            self._closed = True
            unclaimed = [connection for _, connection in self._unclaimed.values()]
            self._unclaimed.clear()
            self._changed.notify_all()
        self._callers.close()
        for connection in unclaimed:
            connection.close()

    # --- The lane within a host ---------------------------------------------------------------------------------------

    def _take(self, proof: str, connection: socket.socket) -> None:
        with self._changed:
            pending = self._pending.pop(proof, None)
            if pending is None:
                self._keep_unclaimed(proof, connection)
        if pending is not None:
            self._hand_over(pending, connection)

    def _keep_unclaimed(self, proof: str, connection: socket.socket) -> None:
        """Keeps a caller whose link this end may be about to expect."""
        now = time.monotonic()
        for old, (since, waiting) in list(self._unclaimed.items()):
            if now - since > deadlines.LINKS.unclaimed:
                waiting.close()
                del self._unclaimed[old]
        if self._closed or proof in self._unclaimed or len(self._unclaimed) >= MAX_UNCLAIMED:
            connection.close()
            return
        self._unclaimed[proof] = (now, connection)

    def _hand_over(self, pending: PendingLink, connection: socket.socket) -> None:
        try:
            connection.send(acceptance(pending.token))
        except OSError:
            connection.close()
            return
        pending.arrive(SocketLink(pending.name, connection))

    def _fail(self, defect: Exception) -> None:
        with self._changed:
            self._defect = defect
            waiting = list(self._pending.values())
        for pending in waiting:
            pending.fail(defect)
        self._on_defect(defect)

    # --- The lane between hosts ---------------------------------------------------------------------------------------

    def _serve_stream(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        metadata = dict(context.invocation_metadata())
        proof = str(metadata.get(PROOF_KEY, ""))
        with self._changed:
            self._changed.wait_for(lambda: self._closed or proof in self._pending, deadlines.LINKS.unclaimed)
            pending = self._pending.pop(proof, None)
        if pending is None:
            caller = metadata.get(NAME_KEY, "")
            context.abort(grpc.StatusCode.PERMISSION_DENIED, f"no link from {caller!r} is expected")
        link = GrpcLink(pending.name, abandon=context.cancel)
        context.add_callback(link.end_outgoing)
        link.read_from(messages)
        pending.arrive(link)
        yield acceptance(pending.token)
        yield from link.outgoing()
