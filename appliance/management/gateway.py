"""The way in for clients that reach the management service only: their calls are handed on, message by message."""

from collections.abc import Callable, Iterator
from typing import Final

import grpc

from interconnect.grpc_lane import METHOD
from interconnect.server import GATEWAY_KEY, make_channel

# What a client calls on other processes than the management service.
_METHODS: Final = ("/wsc.v1.Coordinator/", "/wsc.v1.StateService/", METHOD)

MAX_SECONDS: Final = 1e6  # a call without a deadline seems to have centuries left, which no timeout can be


class Gateway(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic for mypy only
    """Serves calls that bear the address they are for; the bytes of their messages pass through unread."""

    def __init__(self, is_open: Callable[[str], bool]) -> None:
        """is_open(address): whether a client may reach this address."""
        self._is_open = is_open

    def add_to_server(self, server: grpc.Server) -> None:
        """Before the server starts."""
        server.add_generic_rpc_handlers((self,))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata)
        target = metadata.pop(GATEWAY_KEY, None)
        if target is None or not method.startswith(_METHODS):
            return None
        address = str(target)
        own = tuple((key, value) for key, value in metadata.items() if key.startswith("wsc-"))

        def hand_on(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            if not self._is_open(address):
                context.abort(
                    grpc.StatusCode.UNAVAILABLE, f"no coordinator and no MemoryX node of this cluster is at {address}"
                )
            with make_channel(address) as channel:
                # On the wire a call with one message is a stream of one.
                stream = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
                left = context.time_remaining()
                call = stream(requests, timeout=left if left < MAX_SECONDS else None, metadata=own)
                if not context.add_callback(call.cancel):
                    return
                try:
                    yield from call
                except grpc.RpcError as error:
                    assert isinstance(error, grpc.Call)
                    context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(hand_on)
