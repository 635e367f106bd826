"""gRPC servers and channels with the options that all servers and channels of a cluster have.

A cluster of containers publishes one port, that of its ingress, through which scripts reach the other processes. A call
to `coordinator:7000 via 127.0.0.1:9000` goes to 127.0.0.1:9000 with the address of its target in its metadata, and the
gateway there (`appliance.ingress.gateway`) forwards it.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from waferbox import deadlines, settings
from waferbox.host.memory import keep_large_blocks
from waferbox.security.guard import Guard, ServerGuard, bearer
from waferbox.security.tls import open_channel
from waferbox.security.tokens import command_token

# The largest message that a server accepts. CIRH text, the plan of a role and a pickled input function are large; all
# else is small. Larger requests are refused unread, with RESOURCE_EXHAUSTED and the cap.
LARGE_MESSAGE_BYTES: Final = 64 * 1024 * 1024
SMALL_MESSAGE_BYTES: Final = 4 * 1024 * 1024
# The largest message that a client accepts: the outputs of a step come in one.
MAX_RESPONSE_BYTES: Final = 256 * 1024 * 1024
# Every open stream takes a thread, which starts when it is needed. A SwarmX node may have 1,024 children, each with a
# stream; a process with more streams has an AsyncServer.
MAX_THREADS: Final = 2048

# Calls that have arrived and that Python has not taken yet. By default gRPC cancels some of them at random when they
# exceed 1,000, which the calls of a thousand wafers do.
MAX_UNSEEN_CALLS: Final = 16_384

GATEWAY_KEY: Final = "wsc-target"
# In the metadata of calls that an ingress forwards to management, and of the errors that it returns.
INGRESS_KEY: Final = "wsc-ingress"
_VIA: Final = " via "

_OPTIONS: Final = [
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a restarted server is found within a second
]


def _keepalive(timeout_seconds: float) -> list[tuple[str, int]]:
    """Options by which a peer is given up that answers no ping for so long."""
    timeout = round(timeout_seconds * 1000)
    return [
        ("grpc.keepalive_time_ms", round(settings.KEEPALIVE_SECONDS.get() * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", round(settings.KEEPALIVE_SECONDS.get() * 1000 * 2 / 3)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),  # a minute by default, which overrides the timeout of keepalive
    ]


def _answer_seconds() -> float:
    """How long a peer may take to answer a ping."""
    return settings.KEEPALIVE_SECONDS.get() * deadlines.KEEPALIVE.answers_per_interval


def make_server(*, for_scripts: bool = False, job: str | None = None) -> grpc.Server:
    """A server without ports and services; the caller adds these, starts the server and stops it.

    for_scripts: as of server_options. job: as of Guard.
    """
    keep_large_blocks()
    pool = ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="grpc")
    options = server_options(LARGE_MESSAGE_BYTES, for_scripts=for_scripts)
    return grpc.server(pool, options=options, interceptors=[ServerGuard(Guard(job=job))])


def server_options(max_message_bytes: int, *, for_scripts: bool = False) -> list[tuple[str, int]]:
    """The options of a server.

    Args:
        max_message_bytes: larger requests are refused.
        for_scripts: whether its clients are scripts, which their users may suspend for as long as
            deadlines.KEEPALIVE.suspended. The end of a script is noticed nevertheless, by its closed socket.
    """
    keepalive = _keepalive(deadlines.KEEPALIVE.suspended if for_scripts else _answer_seconds())
    unseen = [
        ("grpc.server.max_pending_requests", MAX_UNSEEN_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_UNSEEN_CALLS),
    ]
    largest = ("grpc.max_receive_message_length", max_message_bytes)
    # Without so_reuseport=0 a second process could listen at the same port.
    return [*_OPTIONS, *keepalive, *unseen, largest, ("grpc.so_reuseport", 0)]


def make_channel(address: str, token: str | None = None) -> grpc.Channel:
    """A channel, which connects on its first call; the caller closes it.

    Args:
        address: host:port, or the address that `through` returns.
        token: the token that its calls bear; None: that of a command of this user.
    """
    target, _, gateway = address.partition(_VIA)
    entries = [(GATEWAY_KEY, target)] if gateway else []
    dialled = gateway or target
    if token := command_token(dialled) if token is None else token:
        entries.append(bearer(token))
    channel = open_channel(dialled, channel_options())
    return _MarkedChannel(channel, entries) if entries else channel


def channel_options() -> list[tuple[str, int]]:
    """The options of a channel."""
    keepalive = _keepalive(_answer_seconds())
    largest = ("grpc.max_receive_message_length", MAX_RESPONSE_BYTES)
    # An HTTP proxy that the environment names is for the internet, not for the processes of a cluster.
    without_proxy = ("grpc.enable_http_proxy", 0)
    # gRPC repeats calls that a stopping server has not taken. Where that fails, the reader of a stream waits for ever
    # (grpcio 1.76 to 1.85).
    without_retries = ("grpc.enable_retries", 0)
    return [*_OPTIONS, *keepalive, largest, without_proxy, without_retries]


def through(gateway: str, address: str) -> str:
    """The address for a channel that goes through a gateway; an empty gateway is none."""
    return f"{address}{_VIA}{gateway}" if gateway else address


def status_of(error: grpc.RpcError) -> grpc.Call | grpc.aio.AioRpcError:
    """Returns the error of a call, of either kind of channel, as the object that has its status."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    return error


def is_from_ingress(error: grpc.RpcError) -> bool:
    """Whether a call has failed behind the ingress that it went to, and not on the way to the ingress."""
    entries: Any = status_of(error).trailing_metadata() or ()
    return any(key == INGRESS_KEY for key, _ in entries)


class _MarkedMethod:
    """A method of a channel that adds entries to the metadata of each call."""

    def __init__(self, method: Any, entries: Sequence[tuple[str, str]]) -> None:
        self._method = method
        self._entries = entries

    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        return self._method(request, timeout, metadata=(*self._entries, *(metadata or ())), **options)

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        return self._method.future(request, timeout, metadata=(*self._entries, *(metadata or ())), **options)


class _MarkedChannel(grpc.Channel):
    """A channel of such methods.

    Interceptors would do the same, but look up a method in each call, which ends the process (grpcio 1.80) where
    another thread has just closed the channel.
    """

    def __init__(self, channel: grpc.Channel, entries: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._entries = entries

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return _MarkedMethod(self._channel.unary_unary(*arguments, **options), self._entries)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return _MarkedMethod(self._channel.unary_stream(*arguments, **options), self._entries)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _MarkedMethod(self._channel.stream_unary(*arguments, **options), self._entries)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _MarkedMethod(self._channel.stream_stream(*arguments, **options), self._entries)

    def subscribe(self, *arguments: Any, **options: Any) -> None:
        self._channel.subscribe(*arguments, **options)

    def unsubscribe(self, callback: Any) -> None:
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "_MarkedChannel":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
