"""The entry for clients that reach only an ingress: their calls are forwarded, message by message, undecoded."""

from collections.abc import AsyncIterator, Callable
from typing import Final, TypeAlias

import grpc

from appliance.ingress.targets import Targets
from waferbox.links.grpc_lane import METHOD
from waferbox.rpc.async_server import Context
from waferbox.rpc.server import GATEWAY_KEY, INGRESS_KEY
from waferbox.security.guard import TOKEN_KEY

# Methods that may be called without a target, on management, and with a target, on coordinators and MemoryX nodes.
_MANAGEMENT_METHODS: Final = ("/wsc.v1.Management/", "/wsc.v1.Observation/")
_TARGET_METHODS: Final = ("/wsc.v1.Coordinator/", "/wsc.v1.StateService/", METHOD)

_Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]


class Gateway(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic for mypy only
    """A forwarder of calls to management, or to the address that a call names; in an event loop."""

    def __init__(self, management: str, channel: grpc.aio.Channel, targets: Targets) -> None:
        """channel: to the management service at that address."""
        self._management = management
        self._channel = channel
        self._targets = targets

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Adds the handlers; to be called before the server starts."""
        server.add_generic_rpc_handlers((self,))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata)
        target = str(metadata.pop(GATEWAY_KEY, ""))
        # Only the caller's own token, never this process's: an ingress adds no rights.
        own = tuple((key, value) for key, value in metadata.items() if key.startswith("wsc-") or key == TOKEN_KEY)

        async def to_management(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            marked = (*own, (INGRESS_KEY, ""))
            async for message in _forward(self._channel, method, marked, requests, context, self._explain_management):
                yield message

        async def to_target(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            async with self._targets.channel(target) as channel:
                if channel is None:
                    explanation = f"no coordinator and no node with states of this cluster is at {target}"
                    await _abort(context, grpc.StatusCode.UNAVAILABLE, explanation)
                    return
                async for message in _forward(channel, method, own, requests, context, _details):
                    yield message

        if not target and method.startswith(_MANAGEMENT_METHODS):
            return grpc.stream_stream_rpc_method_handler(to_management)
        if target and method.startswith(_TARGET_METHODS):
            return grpc.stream_stream_rpc_method_handler(to_target)
        return None

    def _explain_management(self, error: grpc.aio.AioRpcError) -> str:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            return error.details() or ""
        return (
            f"the ingress is up, but no management service answers it at {self._management}: start it again there; "
            "jobs that run go on meanwhile"
        )


# The details by grpc.aio of a call whose connection broke in the middle of an operation.
_BROKEN: Final = "Internal error from Core"


async def _forward(
    channel: grpc.aio.Channel,
    method: str,
    metadata: _Metadata,
    requests: AsyncIterator[bytes],
    context: Context,
    explain: Callable[[grpc.aio.AioRpcError], str],
) -> AsyncIterator[bytes]:
    # On the wire a call with one message is a stream of one.
    stream = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
    call = stream(requests, timeout=context.time_remaining(), metadata=metadata)
    try:
        async for message in call:
            yield message
    except grpc.aio.AioRpcError as error:
        is_broken = error.code() == grpc.StatusCode.INTERNAL and error.details() == _BROKEN
        await _abort(context, grpc.StatusCode.UNAVAILABLE if is_broken else error.code(), explain(error))
    finally:
        call.cancel()


def _details(error: grpc.aio.AioRpcError) -> str:
    return error.details() or ""


async def _abort(context: Context, code: grpc.StatusCode, message: str) -> None:
    await context.abort(code, message, ((INGRESS_KEY, ""),))
