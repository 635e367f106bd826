"""Who may call: the user of this process, from this machine. The vendor's client has no token of ours to show."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc

from vendor_gateway.wire.handlers import with_behaviour

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
