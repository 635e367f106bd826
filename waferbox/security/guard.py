"""The check of every call that a server takes, before anything of it is read: by the table of rights; and of requests
over HTTP.
"""

import base64
import binascii
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import grpc

from waferbox.security.rights import RIGHTS, JobScope
from waferbox.security.tokens import Caller, Kind, cluster_secret

# ----------------------------------------------------------------------------------------------------------------------
# How many calls without a valid token come from where: who sends many is answered shortly, and logged once a minute
#
# A valid token is never refused for what others at the same address do.


MAX_ADDRESSES: Final = 1024  # that are kept in mind
WINDOW_SECONDS: Final = 60.0
MAX_IN_WINDOW: Final = 30

logger = logging.getLogger(__name__)


class WrongTokens:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()  # by address: begin of the window, count

    def is_too_many(self, peer: str) -> bool:
        """Counts a call that gRPC says came from this peer; whether there were too many of late."""
        address = peer.rpartition(":")[0]
        now = time.monotonic()
        with self._lock:
            begin, count = self._seen.pop(address, (now, 0))
            if now - begin > WINDOW_SECONDS:
                begin, count = now, 0
            self._seen[address] = (begin, count + 1)
            if len(self._seen) > MAX_ADDRESSES:
                self._seen.popitem(last=False)
        if count == 0:
            logger.warning("a call from %s bore no token of this cluster, and was refused", address or peer)
        return count >= MAX_IN_WINDOW


# --- The check of every call that a server takes, before anything of it is read: by the table of rights ---------------


TOKEN_KEY: Final = "authorization"
SCHEME: Final = "Bearer "

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Refusal: TypeAlias = tuple[grpc.StatusCode, str]

_NO_TOKEN: Final = (
    "bears no valid token of this cluster. A script or a command needs WAFERBOX_TOKEN, which `waferbox token` prints "
    "where the cluster runs, or the account that the cluster runs under; a process of the cluster needs the same "
    "secret in the file that WAFERBOX_SECRET_FILE names"
)


def bearer(token: str) -> tuple[str, str]:
    """The entry of a call's metadata that shows a token."""
    return TOKEN_KEY, SCHEME + token


def caller_of(metadata: Metadata | None) -> Caller | None:
    """Who makes a call with this metadata; None if its token is none of this cluster."""
    shown = dict(metadata or ()).get(TOKEN_KEY, "")
    if not isinstance(shown, str) or not shown.startswith(SCHEME):
        return None
    return cluster_secret().caller(shown.removeprefix(SCHEME))


class Guard:
    """What is checked of a call to one server."""

    def __init__(self, *, job: str | None = None, owner_of: Callable[[str], str | None] | None = None) -> None:
        """job: that the process works for, if it is a coordinator. owner_of: the user whose job it is; None: nobody's.

        Raises OSError: there is no secret, and none can be made.
        """
        cluster_secret()
        self._job = job
        self._owner_of = owner_of
        self._wrong = WrongTokens()

    def refusal_of(self, method: str, caller: Caller | None) -> _Refusal | None:
        """Why nobody so may call a method, whatever the request says; None if he may."""
        right = RIGHTS.get(method)
        if right is None:
            return grpc.StatusCode.PERMISSION_DENIED, f"nobody may call {method}"
        if not right.kinds:
            return None
        if caller is None:
            return grpc.StatusCode.UNAUTHENTICATED, f"the call {_NO_TOKEN}"
        if caller.kind not in right.kinds:
            return grpc.StatusCode.PERMISSION_DENIED, f"a token of kind {caller.kind.value} does not open {method}"
        if right.job_scope is JobScope.SERVED and self._job is not None and caller.name != self._job:
            return grpc.StatusCode.PERMISSION_DENIED, f"the token is of another job than {self._job}"
        return None

    def refusal_of_request(self, caller: Caller, job: str) -> _Refusal | None:
        """Why a caller who may call a method may not call it for a job; None if he may."""
        if caller.kind in (Kind.JOB, Kind.MEMBER) and caller.name != job:
            return grpc.StatusCode.PERMISSION_DENIED, "the token is of another job"
        if caller.kind is Kind.USER:
            owner = None if self._owner_of is None else self._owner_of(job)
            if owner is not None and owner != caller.name:
                return grpc.StatusCode.PERMISSION_DENIED, "the job belongs to another user"
        return None

    def refusal(self, refusal: _Refusal, peer: str) -> _Refusal:
        """What is answered; less to who asks again and again."""
        if refusal[0] is grpc.StatusCode.UNAUTHENTICATED and self._wrong.is_too_many(peer):
            return grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls without a valid token came from this address"
        return refusal


class ServerGuard(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic for mypy only
    """A Guard of a server with threads."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], _Handler], handler_call_details: Any
    ) -> _Handler:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method, guard = handler_call_details.method, self._guard
        caller = caller_of(handler_call_details.invocation_metadata)
        refusal = guard.refusal_of(method, caller)
        if refusal is not None:

            def refuse(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
                context.abort(*guard.refusal(refusal, context.peer()))

            return grpc.stream_stream_rpc_method_handler(refuse)
        if caller is None or RIGHTS[method].job_scope is not JobScope.OWN or handler.request_streaming:
            return handler

        def checked(behaviour: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            def call(request: Any, context: grpc.ServicerContext) -> Any:
                if (refusal := guard.refusal_of_request(caller, request.job)) is not None:
                    context.abort(*refusal)
                return behaviour(request, context)

            return call

        return _with_behaviour(handler, checked, checked)


class AsyncServerGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """A Guard of a server in an event loop."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method, guard = handler_call_details.method, self._guard
        caller = caller_of(handler_call_details.invocation_metadata)
        refusal = guard.refusal_of(method, caller)
        if refusal is not None:

            async def refuse(requests: Any, context: Any) -> None:
                await context.abort(*guard.refusal(refusal, context.peer()))

            return grpc.stream_stream_rpc_method_handler(refuse)
        if caller is None or RIGHTS[method].job_scope is not JobScope.OWN or handler.request_streaming:
            return handler

        async def check(request: Any, context: Any) -> None:
            if (refusal := guard.refusal_of_request(caller, request.job)) is not None:
                await context.abort(*refusal)

        def checked(behaviour: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
            async def call(request: Any, context: Any) -> Any:
                await check(request, context)
                return await behaviour(request, context)

            return call

        def checked_stream(
            behaviour: Callable[[Any, Any], AsyncIterator[Any]],
        ) -> Callable[[Any, Any], AsyncIterator[Any]]:
            async def call(request: Any, context: Any) -> AsyncIterator[Any]:
                await check(request, context)
                async for response in behaviour(request, context):
                    yield response

            return call

        return _with_behaviour(handler, checked, checked_stream)


def _with_behaviour(
    handler: Any, checked: Callable[[Any], Callable[[Any, Any], Any]], checked_stream: Callable[[Any], Any]
) -> _Handler:
    """The handler of a request that is no stream, behind a check."""
    codecs = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(checked_stream(handler.unary_stream), **codecs)
    return grpc.unary_unary_rpc_method_handler(checked(handler.unary_unary), **codecs)


# ----------------------------------------------------------------------------------------------------------------------
# Who may look at a page or at figures over HTTP, from beyond this machine: who shows the token of a viewer


LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="waferbox: the password is a token of waferbox token --view"')


def may_view(authorization: str) -> bool:
    """Whether the header Authorization of a request shows such a token: as Bearer, or as the password of Basic."""
    scheme, _, shown = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            shown = base64.b64decode(shown, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return False
    elif scheme.lower() != "bearer":
        return False
    caller = cluster_secret().caller(shown)
    return caller is not None and caller.kind in (Kind.VIEWER, Kind.ADMIN)
