"""The registration of a node with management: it renews the lease, and is repeated when management restarts."""

import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc

from waferbox import deadlines
from waferbox.host.threads import GuardedThread
from waferbox.rpc.server import make_channel
from waferbox.security.tokens import Kind, cluster_secret
from wsc.v1 import management_pb2, management_pb2_grpc

logger = logging.getLogger(__name__)


# Status codes that another attempt does not change: another version of Waferbox, an address that cannot be reached.
REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class _Cancellable(Protocol):
    def cancel(self) -> object: ...


class Registration:
    """The registration of one node. A thread holds the Register stream, and opens it again when it breaks."""

    def __init__(
        self, management: str, hello: Callable[[], management_pb2.RegisterRequest], on_refusal: Callable[[str], None]
    ) -> None:
        """
        Args:
            management: the host:port of management.
            hello: returns the next message, with the job that the node works for.
            on_refusal: called once, with a message, when management refuses the node, or the thread has a defect; the
                process should exit then.
        """
        self.instance = secrets.token_hex(8)  # names the current registration, or the next
        self._registered = False  # whether management has this instance
        self._management = management
        self._hello = hello
        self._on_refusal = on_refusal
        self._closing = threading.Event()
        self._thread = GuardedThread(self._run, name="registration", on_defect=self._defect)
        self._interval = deadlines.REGISTRATION.first_heartbeat
        self._lock = threading.Lock()
        self._call: _Cancellable | None = None

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the stream, and so the registration."""
        self._closing.set()
        with self._lock:
            self._cancel()
        self._thread.join()

    def _defect(self, error: Exception) -> None:
        self._on_refusal(f"a defect in this node's registration: {error!r}")

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> None:
        reported = ""
        while not self._closing.is_set():
            try:
                self._hold()
            except grpc.RpcError as error:
                if self._closing.is_set():
                    return
                code, details = (error.code(), error.details()) if isinstance(error, grpc.Call) else (None, str(error))
                if code == grpc.StatusCode.UNIMPLEMENTED:
                    self._on_refusal(f"what listens at {self._management} is no management service: check the port")
                    return
                if code in REFUSALS:
                    self._on_refusal(f"{self._management} refuses this node: {details}")
                    return
                if reported != details:
                    reported = details or ""
                    logger.warning("no management at %s: %s; trying again", self._management, reported)
            self._closing.wait(deadlines.REGISTRATION.retry)

    def _hold(self) -> None:
        """Holds one Register stream, from its first message to its end."""
        ended = threading.Event()
        if self._registered:
            self.instance, self._registered = secrets.token_hex(8), False
        with make_channel(self._management, cluster_secret().token(Kind.NODE)) as channel:
            call = management_pb2_grpc.ManagementStub(channel).Register(self._requests(ended))
            with self._lock:
                self._call = call
                if self._closing.is_set():
                    self._cancel()
            try:
                for response in call:
                    self._registered = True
                    self._interval = max(0.05, response.lease_seconds / deadlines.REGISTRATION.heartbeats_per_lease)
                    logger.debug("registered as %s", response.node_id)
            finally:
                ended.set()

    def _requests(self, ended: threading.Event) -> Iterator[management_pb2.RegisterRequest]:
        while True:
            hello = self._hello()
            hello.instance = self.instance
            yield hello
            if ended.wait(self._interval):
                return
