"""The thread that accepts connections on a Unix socket and reads from each the proof of the link that it is for.

The thread waits for no single caller, so neither a silent caller nor a shortage of descriptors delays the others.
"""

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Final

from waferbox import deadlines
from waferbox.host.descriptors import SHORTAGES
from waferbox.host.threads import GuardedThread
from waferbox.links.frame import FrameError
from waferbox.links.handshake import MAX_HELLO_BYTES, is_same_user, proof_of
from waferbox.links.socket_names import NamedSocket

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.1  # between attempts to accept during a shortage of descriptors or memory
MAX_CALLERS: Final = 256  # without a first message yet; further callers wait in the kernel's queue


class AcceptLoop:
    """The listening socket of a process, with the thread that accepts callers of the same user.

    Used by one thread, beside its own.
    """

    def __init__(self, on_caller: Callable[[str, socket.socket], None], on_defect: Callable[[Exception], None]) -> None:
        """Starts to listen. Both functions are called in the thread of the loop.

        Args:
            on_caller: called with a caller's proof and its connection, which the function then owns.
            on_defect: called last, when an unexpected exception ends the thread.
        """
        self._on_caller = on_caller
        self._named = NamedSocket()
        self.name, self.host = self._named.name, self._named.directory.host  # by which a dialler finds the socket
        self._listener = self._named.socket
        self._close_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._deadlines: dict[socket.socket, float] = {}  # of callers without a first message; the oldest is first
        self._paused_until: float | None = None
        self._is_short = False  # of descriptors or memory; the shortage has been logged
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._close_event, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = GuardedThread(self._run, name="link-listener", on_defect=on_defect)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and closes the connections without a first message."""
        os.eventfd_write(self._close_event, 1)
        self._thread.join()
        self._selector.close()
        os.close(self._close_event)
        self._named.close()
        for connection in self._deadlines:
            connection.close()
        self._deadlines.clear()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._seconds_to_deadline()):
                if key.fd == self._close_event:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read_hello(key.fileobj)
            self._keep_deadlines()

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [] if self._paused_until is None else [self._paused_until]
        deadlines += list(self._deadlines.values())[:1]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _keep_deadlines(self) -> None:
        now = time.monotonic()
        for connection in [caller for caller, deadline in self._deadlines.items() if deadline <= now]:
            self._forget(connection)
            connection.close()
        if self._paused_until is not None and self._paused_until <= now:
            self._paused_until = None
        accepts = self._paused_until is None and len(self._deadlines) < MAX_CALLERS
        if accepts != (self._listener in self._selector.get_map()):
            if accepts:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the caller has closed the connection
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            if not self._is_short:
                logger.warning("Links wait, as no connection can be accepted: %s", error.strerror)
            self._is_short = True
            self._paused_until = time.monotonic() + RETRY_SECONDS
            return
        self._is_short = False
        if not is_same_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._deadlines[connection] = time.monotonic() + deadlines.LINKS.handshake
        self._selector.register(connection, selectors.EVENT_READ)

    def _read_hello(self, connection: socket.socket) -> None:
        self._forget(connection)
        try:
            proof = proof_of(connection.recv(MAX_HELLO_BYTES))
        except (OSError, FrameError):
            connection.close()
            return
        self._on_caller(proof, connection)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._deadlines[connection]
