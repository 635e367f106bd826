"""What gRPC leaves out: changing a handler's behaviour, the authority of a call, and calls that nobody serves."""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import grpc

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
