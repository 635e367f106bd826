"""The calls of the vendor's client: who may make them (this user, from this machine), and what gRPC leaves out: their
authority, and methods that nobody serves.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

# ----------------------------------------------------------------------------------------------------------------------
# What gRPC leaves out: changing a handler's behaviour, the authority of a call, and calls that nobody serves


logger = logging.getLogger(__name__)

MAX_UNKNOWN: Final = 256  # calls whose names are logged

_Behaviour = Callable[[Any, Any], Any]


def with_behaviour(handler: Any, change: Callable[[_Behaviour], _Behaviour]) -> Any:
    """The handler of a method, with its behaviour changed."""
    name = f"{_number(handler.request_streaming)}_{_number(handler.response_streaming)}"
    make = getattr(grpc, f"{name}_rpc_method_handler")
    return make(change(getattr(handler, name)), handler.request_deserializer, handler.response_serializer)


def _number(streaming: bool) -> str:
    return "stream" if streaming else "unary"


class Unregistered:
    """A server to which generated code adds its services: gRPC tells no authority where methods are registered."""

    def __init__(self, server: grpc.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Not these: the generic ones do the same."""


def authority_of(context: grpc.ServicerContext) -> str:
    """What the client has named as the authority of its call."""
    # No public attribute has it; a release of grpcio without this one fails the tests.
    host: bytes = context._rpc_event.call_details.host  # type: ignore[attr-defined]
    return host.decode(errors="replace")


class UnknownCalls(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic for mypy only
    """To be added last: logs the name of a call that nobody serves, once, and leaves the answer to gRPC."""

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


# ----------------------------------------------------------------------------------------------------------------------
# Who may call: the user of this process, from this machine. The vendor's client has no token of ours to show


SOCKET_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
REMEMBERED_SECONDS: Final = 5.0
MAX_REMEMBERED: Final = 1024
_LOCAL: Final = ("127.", "::1", "::ffff:127.")

REFUSAL: Final = (
    "serves its own user on its own machine alone, because this client has no token to show: start it as that user, or "
    "give the gateway --insecure where everybody who reaches it may have jobs"
)


def owner_of(peer: str) -> int | None:
    """The number of the user whose socket of this machine that is, as gRPC names a peer; None: of another machine."""
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
            # Its own end of the connection has the peer's port as the local one.
            if fields[1].endswith(wanted) and fields[3] != _LISTENS:
                return int(fields[7])
    return None


_LISTENS: Final = "0A"


class Callers:
    """Remembers for a while who is at the other end of a connection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._allowed: OrderedDict[str, float] = OrderedDict()  # peers, and until when; monotonic

    def may_call(self, peer: str) -> bool:
        """Whether whoever is there is the user of this process, on this machine."""
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
    """Refuses calls of others, before anything of them is read."""

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
