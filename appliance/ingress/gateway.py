"""The way in for clients that reach an ingress only: their calls are handed on, message by message, unread."""

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import grpc

from appliance.ingress.targets import Targets
from interconnect.links.grpc_lane import METHOD
from interconnect.rpc.server import GATEWAY_KEY, INGRESS_KEY

# What may be called without a target, on the management service, and with one, on coordinators and MemoryX nodes.
_MANAGEMENT_METHODS: Final = ("/wsc.v1.Management/", "/wsc.v1.Observation/")
_TARGET_METHODS: Final = ("/wsc.v1.Coordinator/", "/wsc.v1.StateService/", METHOD)

MAX_SECONDS: Final = 1e6  # a call without a deadline seems to have centuries left, which no timeout can be

_Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


class Gateway(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic for mypy only
    """Serves calls that are for the management service, or bear the address they are for."""

    def __init__(self, management: str, channel: grpc.Channel, targets: Targets) -> None:
        """channel: to the management service at that address."""
        self._management = management
        self._channel = channel
        self._targets = targets

    def add_to_server(self, server: grpc.Server) -> None:
        """Before the server starts."""
        server.add_generic_rpc_handlers((self,))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata)
        target = str(metadata.pop(GATEWAY_KEY, ""))
        own = tuple((key, value) for key, value in metadata.items() if key.startswith("wsc-"))

        def to_management(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            marked = (*own, (INGRESS_KEY, ""))
            yield from _hand_on(self._channel, method, marked, requests, context, self._explain_management)

        def to_target(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._targets.channel(target) as channel:
                if channel is None:
                    message = f"no coordinator and no MemoryX node of this cluster is at {target}"
                    _abort(context, grpc.StatusCode.UNAVAILABLE, message)
                    return
                yield from _hand_on(channel, method, own, requests, context, lambda error: error.details() or "")

        if not target and method.startswith(_MANAGEMENT_METHODS):
            return grpc.stream_stream_rpc_method_handler(to_management)
        if target and method.startswith(_TARGET_METHODS):
            return grpc.stream_stream_rpc_method_handler(to_target)
        return None

    def _explain_management(self, error: grpc.Call) -> str:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            return error.details() or ""
        return (
            f"the ingress is up, but no management service answers it at {self._management}: start it again there; "
            "jobs that run go on meanwhile"
        )


def _hand_on(
    channel: grpc.Channel,
    method: str,
    metadata: _Metadata,
    requests: Iterator[bytes],
    context: grpc.ServicerContext,
    explain: Callable[[grpc.Call], str],
) -> Iterator[bytes]:
    # On the wire a call with one message is a stream of one.
    stream = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
    left = context.time_remaining()
    call = stream(requests, timeout=left if left < MAX_SECONDS else None, metadata=metadata)
    if not context.add_callback(call.cancel):
        return
    try:
        yield from call
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        _abort(context, error.code(), explain(error))


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> None:
    context.set_trailing_metadata(((INGRESS_KEY, ""),))
    context.abort(code, message)
