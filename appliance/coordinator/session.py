"""The client's session: the messages to the client, and the detection of its end."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator

from waferbox import deadlines
from waferbox.host.threads import GuardedTimer
from waferbox.rpc.address import split_address
from wsc.v1 import coordinator_pb2


class ClientSession:
    """The session of a job's client; at most one. Thread-safe."""

    def __init__(
        self,
        on_missing: Callable[[str], None],
        on_defect: Callable[[Exception], None],
        seconds: float,
        ingress: str = "",
        on_cut_off: Callable[[], bool] | None = None,
    ) -> None:
        """Makes a session that is not open.

        Args:
            on_missing: called with a message if no client has connected within `seconds`.
            on_defect: called with an unexpected exception of the timer.
            seconds: until the client must open the session.
            ingress: address of the ingress that runs this process; empty: none does.
            on_cut_off: called when the connection to a client on another host broke. Returns True if this process is
                about to end and a successor waits for the client.
        """
        self._ingress = ingress
        self._on_cut_off = on_cut_off
        self._ended = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self._messages: queue.SimpleQueue[coordinator_pb2.SessionResponse | None] = queue.SimpleQueue()
        self._timeout = GuardedTimer(
            seconds,
            lambda: on_missing(f"the client did not open a session within {seconds:g} s"),
            name="session-timeout",
            on_defect=on_defect,
        )

    def expect(self) -> None:
        """Starts the client's time."""
        self._timeout.start()

    def open(self) -> bool:
        """Opens the session; False if it was opened before."""
        self._timeout.cancel()
        with self._lock:
            if self._opened.is_set():
                return False
            self._opened.set()
        return True

    def end(self, *, is_finished: bool) -> None:
        """Notes the end of the client's stream. is_finished: whether the client had announced it."""
        self._ended.set()
        if not is_finished:
            self.check_connection()

    def check_connection(self) -> None:
        """Blocks if a stream may have ended against the client's intention; to be called before the job ends for it.

        If the ingress has died or the client was cut off, this process is about to be ended: the call waits for that.
        """
        if self._ingress:
            # The port of a dying ingress may still accept connections. This process is ended with it, during the wait.
            self._closed.wait(deadlines.COORDINATION.ingress_dying)
        is_orphaned = bool(self._ingress) and not _listens(self._ingress)
        if is_orphaned or self._is_cut_off():
            self._closed.wait(deadlines.COORDINATION.orphaned)

    def _is_cut_off(self) -> bool:
        return self._on_cut_off is not None and self._ended.wait(deadlines.COORDINATION.together) and self._on_cut_off()

    def reconnects(self) -> bool:
        """Handles a client that reconnects before its loss was noticed; True if a successor waits for it."""
        return self._on_cut_off is not None and self._on_cut_off()

    def wait_until_open(self, seconds: float) -> None:
        """Waits for the client to open the session."""
        self._opened.wait(seconds)

    def send(self, message: coordinator_pb2.SessionResponse) -> None:
        """Queues a message to the client. Never blocks."""
        self._messages.put(message)

    def messages(self) -> Iterator[coordinator_pb2.SessionResponse]:
        """Yields the messages to the client, until close."""
        yield from iter(self._messages.get, None)

    def close(self) -> None:
        """Ends the messages."""
        self._closed.set()
        self._timeout.cancel()
        self._messages.put(None)


def _listens(address: str) -> bool:
    """Whether a process of this host accepts connections at this address."""
    host, port = split_address(address)
    try:
        socket.create_connection((host.strip("[]"), port), deadlines.COORDINATION.listens).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True
