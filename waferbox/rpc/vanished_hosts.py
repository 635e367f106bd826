"""Ends connections of a server for scripts whose other host has vanished, as by a power cut or a pulled cable.

A script may be suspended for as long as its user likes, as in a debugger, so its answer to a ping is awaited for an
hour. The kernel of its host still acknowledges what it gets; that of a host that has vanished does not. gRPC does not
give out its sockets: they are found among the descriptors of the process.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final

from waferbox import deadlines
from waferbox.rpc.address import split_address

logger = logging.getLogger(__name__)

CHECKS: Final = 6  # in deadlines.KEEPALIVE.vanished
# In Linux's struct tcp_info: milliseconds since the last acknowledgement.
_LAST_ACK_OFFSET: Final = 56
_TCP_INFO_BYTES: Final = 104
_MOST_PROBES: Final = 127  # that Linux allows, before it ends a connection itself


class VanishedHosts:
    """The watch over the connections of a server. Used in one event loop."""

    def __init__(self, address: str, on_defect: Callable[[Exception], None]) -> None:
        """Makes a watch that is not started.

        Args:
            address: host:port of the server.
            on_defect: called with an exception that ends the watch.
        """
        self._port = split_address(address)[1]
        self._on_defect = on_defect
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to end connections to hosts that are silent for deadlines.KEEPALIVE.vanished."""
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Ends the watch; the connections stay."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        try:
            while True:
                await asyncio.sleep(deadlines.KEEPALIVE.vanished / CHECKS)
                end_connections(self._port, deadlines.KEEPALIVE.vanished)
        except Exception as error:
            logger.exception("a defect in the watch over connections")
            self._on_defect(error)


def end_connections(port: int, seconds: float) -> None:
    """Ends the connections to a server of this process that another host has not acknowledged anything on for long.

    Args:
        port: of the server.
        seconds: the time without an acknowledgement. It counts from the second call on, since the first one makes the
            kernel ask silent hosts for acknowledgements.
    """
    for connection in _connections(port):
        with contextlib.suppress(OSError):  # it ends just now
            host = connection.getpeername()[0].removeprefix("::ffff:")
            if is_silent(connection, seconds):
                logger.warning("%s has not answered for %.0f s: the connection to it is ended", host, seconds)
                connection.shutdown(socket.SHUT_RDWR)


def is_silent(connection: socket.socket, seconds: float) -> bool:
    """Whether the other host of a connection was asked for acknowledgements, and has sent none for so long."""
    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        between = max(1, round(seconds / CHECKS))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, between)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_PROBES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return float(struct.unpack_from("=I", info, _LAST_ACK_OFFSET)[0]) > seconds * 1000.0


def _connections(port: int) -> Iterator[socket.socket]:
    """Yields the connections to a server of this process, each as a descriptor of its own, closed after its turn."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as duplicate:
                if _is_connection(duplicate, port):
                    yield duplicate


def _is_connection(candidate: socket.socket, port: int) -> bool:
    is_tcp = candidate.family in (socket.AF_INET, socket.AF_INET6) and candidate.type == socket.SOCK_STREAM
    if not is_tcp or candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return int(candidate.getsockname()[1]) == port
