"""gRPC servers and channels with the options that all of the project's have."""

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc

from interconnect.allocator import keep_large_blocks

# State, inputs and CIRH text go in single messages; tensors of a step never do.
MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
# Every open stream keeps a thread; threads are made when they are needed.
MAX_THREADS: Final = 256

_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]


def make_server() -> grpc.Server:
    """A server without ports and services; the caller adds them, starts it and stops it."""
    keep_large_blocks()
    pool = ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="grpc")
    # One port, one process: without this a second process could take the same port.
    return grpc.server(pool, options=[*_OPTIONS, ("grpc.so_reuseport", 0)])


def make_channel(address: str) -> grpc.Channel:
    """A channel to host:port; nothing is sent before it is used, and the caller closes it."""
    # An environment's HTTP proxy has no business between the processes of a cluster.
    return grpc.insecure_channel(address, options=[*_OPTIONS, ("grpc.enable_http_proxy", 0)])
