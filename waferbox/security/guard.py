"""The guard of a server, which checks each call against the table of rights before the request is read.

Requests over HTTP, for the page and the figures, are checked here too.
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

# --- Calls without a valid token --------------------------------------------------------------------------------------


MAX_ADDRESSES: Final = 1024  # that are counted at once
WINDOW_SECONDS: Final = 60.0
MAX_IN_WINDOW: Final = 30

logger = logging.getLogger(__name__)


class WrongTokens:
    """Counts of the calls without a valid token, by address: an address with many gets short answers. Thread-safe.

    A valid token is never refused for the calls of others at the same address.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()  # by address: begin of the window, count

    def is_too_many(self, peer: str) -> bool:
        """Counts a call of a peer, as gRPC names it; returns whether its address has made too many lately."""
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
            logger.warning("A call from %s bore no token of this cluster, and was refused", address or peer)
        return count >= MAX_IN_WINDOW


# --- Calls ------------------------------------------------------------------------------------------------------------


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
    """The entry of a call's metadata that bears a token."""
    return TOKEN_KEY, SCHEME + token


def caller_of(metadata: Metadata | None) -> Caller | None:
    """The caller that the token in a call's metadata names; None without a token of this cluster."""
    shown = dict(metadata or ()).get(TOKEN_KEY, "")
    if not isinstance(shown, str) or not shown.startswith(SCHEME):
        return None
    return cluster_secret().caller(shown.removeprefix(SCHEME))


class Guard:
    """The checks of calls to one server. Thread-safe."""

    def __init__(self, *, job: str | None = None, owner_of: Callable[[str], str | None] | None = None) -> None:
        """Makes the guard.

        Args:
            job: the job of a coordinator; None for another process.
            owner_of: returns the user who owns a job; None for an unknown job.

        Raises:
            OSError: there is no cluster secret, and none can be made.
        """
        cluster_secret()
        self._job = job
        self._owner_of = owner_of
        self._wrong = WrongTokens()

    def refusal_of(self, method: str, caller: Caller | None) -> _Refusal | None:
        """Reason to refuse this caller, whatever the request contains; None if allowed."""
        right = RIGHTS.get(method)
        if right is None:
            return grpc.StatusCode.PERMISSION_DENIED, f"no caller has a right to {method}"
        if not right.kinds:
            return None
        if caller is None:
            return grpc.StatusCode.UNAUTHENTICATED, f"the call {_NO_TOKEN}"
        if caller.kind not in right.kinds:
            kinds = " or ".join(sorted(kind.value for kind in right.kinds))
            return (
                grpc.StatusCode.PERMISSION_DENIED,
                f"a token of kind {caller.kind.value} does not open {method}: it takes one of kind {kinds}",
            )
        if right.job_scope is JobScope.SERVED and self._job is not None and caller.name != self._job:
            return grpc.StatusCode.PERMISSION_DENIED, f"the token is of another job than {self._job}"
        return None

    def refusal_of_request(self, caller: Caller, job: str) -> _Refusal | None:
        """Reason to refuse a request for a job, of a caller with a right to the method; None if allowed."""
        if caller.kind in (Kind.JOB, Kind.MEMBER) and caller.name != job:
            return grpc.StatusCode.PERMISSION_DENIED, "the token is of another job"
        if caller.kind is Kind.USER:
            owner = None if self._owner_of is None else self._owner_of(job)
            if owner is not None and owner != caller.name:
                return grpc.StatusCode.PERMISSION_DENIED, "the job belongs to another user"
        return None

    def refusal(self, refusal: _Refusal, peer: str) -> _Refusal:
        """The answer for a refused call; a shorter one to an address with many calls without a token."""
        if refusal[0] is grpc.StatusCode.UNAUTHENTICATED and self._wrong.is_too_many(peer):
            return grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls without a valid token came from this address"
        return refusal


class ServerGuard(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic for mypy only
    """The interceptor that puts a Guard before a server with threads. Thread-safe."""

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
    """The interceptor that puts a Guard before a server in an event loop."""

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
    """A copy of the handler of a single request, with a check before it."""
    codecs = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(checked_stream(handler.unary_stream), **codecs)
    return grpc.unary_unary_rpc_method_handler(checked(handler.unary_unary), **codecs)


# --- Requests over HTTP -----------------------------------------------------------------------------------------------


CHALLENGE: Final = ("WWW-Authenticate", 'Basic realm="waferbox: the password is a token of waferbox token --view"')


def may_view(authorization: str) -> bool:
    """Whether the header Authorization of a request from another machine bears the token of a viewer or an admin.

    The token is that of Bearer, or the password of Basic.
    """
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
