"""Helpers for the calls of the vendor's client: their permission, their authority, and methods that are not served."""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

# --- Extensions of gRPC -----------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

MAX_UNKNOWN: Final = 256  # the most names of unknown calls that are logged

_Behaviour = Callable[[Any, Any], Any]


def with_behaviour(handler: Any, change: Callable[[_Behaviour], _Behaviour]) -> Any:
    """Returns the handler of a method with a changed behaviour."""
    name = f"{_number(handler.request_streaming)}_{_number(handler.response_streaming)}"
    make = getattr(grpc, f"{name}_rpc_method_handler")
    return make(change(getattr(handler, name)), handler.request_deserializer, handler.response_serializer)


def _number(streaming: bool) -> str:
    return "stream" if streaming else "unary"


class Unregistered:
    """A server that generated code adds its services to as generic handlers.

    gRPC does not pass the authority of a call to a registered method.
    """

    def __init__(self, server: grpc.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Has no effect: the generic handlers serve the same methods."""


def authority_of(context: grpc.ServicerContext) -> str:
    """Returns the authority that the client has named in its call."""
    # No public attribute has the authority. A release of grpcio without this private one fails the tests.
    host: bytes = context._rpc_event.call_details.host  # type: ignore[attr-defined]
    return host.decode(errors="replace")


class UnknownCalls(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic for mypy only
    """The last handler of a server: logs the name of each unknown method once; gRPC responds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: set[str] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        name = str(handler_call_details.method)[:256]
        with self._lock:
            is_new = name not in self._names and len(self._names) < MAX_UNKNOWN
            self._names.add(name) if is_new else None
        if is_new:
            logger.warning("%s is not served: a client that calls it gets UNIMPLEMENTED", name)


# --- Permission -------------------------------------------------------------------------------------------------------
#
# The vendor's client has no token, so the gateway serves the user of its own process, on its own machine.


SOCKET_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
REMEMBERED_SECONDS: Final = 5.0
MAX_REMEMBERED: Final = 1024
_LOCAL: Final = ("127.", "::1", "::ffff:127.")

REFUSAL: Final = (
    "serves only its own user on its own machine, because this client has no token: start the client as that user, or "
    "give the gateway --insecure if everybody who reaches it may have jobs"
)
_LISTENS: Final = "0A"  # the state of a listening socket in the tables


def owner_of(peer: str) -> int | None:
    """Returns the id of the user who owns the socket of a peer, as gRPC names it; None: it is on another machine."""
    kind, _, address = peer.partition(":")
    host, _, port = address.rpartition(":")
    host = host.replace("%5B", "").replace("%5D", "").strip("[]")
    if kind not in ("ipv4", "ipv6") or not host.startswith(_LOCAL) or not port.isdigit():
        return None
    wanted = f":{int(port):04X}"
    for table in SOCKET_TABLES:
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            # The row of the peer's end has the peer's port as its local one.
            if fields[1].endswith(wanted) and fields[3] != _LISTENS:
                return int(fields[7])
    return None


class Callers:
    """The peers that may call, each for REMEMBERED_SECONDS after a look into the socket tables. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allowed: OrderedDict[str, float] = OrderedDict()  # the time until which each peer may call; monotonic

    def may_call(self, peer: str) -> bool:
        """Whether a peer belongs to the user of this process, or to root, on this machine."""
        now = time.monotonic()
        with self._lock:
            if self._allowed.get(peer, 0.0) > now:
                return True
        if owner_of(peer) not in (os.getuid(), 0):
            return False
        with self._lock:
            self._allowed.pop(peer, None)
            self._allowed[peer] = now + REMEMBERED_SECONDS
            if len(self._allowed) > MAX_REMEMBERED:
                self._allowed.popitem(last=False)
        return True


class CallerGuard(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic for mypy only
    """Refuses the calls of other users before their requests are read. Thread-safe."""

    def __init__(self) -> None:
        self._callers = Callers()

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = continuation(handler_call_details)
        return None if handler is None else with_behaviour(handler, self._checked)

    def _checked(self, behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            if not self._callers.may_call(context.peer()):
                context.abort(grpc.StatusCode.PERMISSION_DENIED, f"the gateway at this address {REFUSAL}")
            return behaviour(request, context)

        return call
