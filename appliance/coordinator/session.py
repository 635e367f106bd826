"""The client's session: what the client is told while the job lasts, and whether it is there at all."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator

from waferbox import deadlines
from waferbox.host.threads import GuardedTimer
from waferbox.rpc.address import split_address
from wsc.v1 import coordinator_pb2


class ClientSession:
    """At most one session, of one client. Thread-safe."""

    def __init__(
        self,
        on_missing: Callable[[str], None],
        on_defect: Callable[[Exception], None],
        seconds: float,
        ingress: str = "",
        on_cut_off: Callable[[], bool] | None = None,
    ) -> None:
        """on_missing(message): no client has come within so many seconds. on_defect(error): of what waits.

        ingress: the address of the one that runs this process; empty: none does. on_cut_off: for a client
        that can be cut off; its connection broke. True: this process is about to end, and another waits for the client.
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
            lambda: on_missing(f"the client did not come within {seconds:g} s"),
            name="session-timeout",
            on_defect=on_defect,
        )

    def expect(self) -> None:
        """Give the client its time to come."""
        self._timeout.start()

    def open(self) -> bool:
        """The client is here; False if it was before."""
        self._timeout.cancel()
        with self._lock:
            if self._opened.is_set():
                return False
            self._opened.set()
        return True

    def end(self, *, is_finished: bool) -> None:
        """The client's stream has ended. is_finished: as the client had said that it would."""
        self._ended.set()
        if not is_finished:
            self.check_connection()

    def check_connection(self) -> None:
        """To be called before the end of a stream is taken for the client's wish.

        Where the ingress has died, or the client was cut off, it was not: then this process is about to be ended as
        well, which is waited for here.
        """
        if self._ingress:
            # While it dies its port may take connections still. This process is ended with it, before the wait is over.
            self._closed.wait(deadlines.COORDINATION.ingress_dying)
        is_orphaned = bool(self._ingress) and not _listens(self._ingress)
        if is_orphaned or self._is_cut_off():
            self._closed.wait(deadlines.COORDINATION.orphaned)

    def _is_cut_off(self) -> bool:
        return self._on_cut_off is not None and self._ended.wait(deadlines.COORDINATION.together) and self._on_cut_off()

    def reconnects(self) -> bool:
        """The client has noticed that its connection broke, and we have not; whether another process waits for it."""
        return self._on_cut_off is not None and self._on_cut_off()

    def wait_until_open(self, seconds: float) -> None:
        """For a client that is on its way."""
        self._opened.wait(seconds)

    def tell(self, message: coordinator_pb2.SessionResponse) -> None:
        """Queue a message to the client. Never blocks."""
        self._messages.put(message)

    def messages(self) -> Iterator[coordinator_pb2.SessionResponse]:
        """What the client is to know, as it comes, until close."""
        yield from iter(self._messages.get, None)

    def close(self) -> None:
        """Nothing more is told."""
        self._closed.set()
        self._timeout.cancel()
        self._messages.put(None)


def _listens(address: str) -> bool:
    """Whether somebody takes connections there, on this host."""
    host, port = split_address(address)
    try:
        socket.create_connection((host.strip("[]"), port), deadlines.COORDINATION.listens).close()
    except TimeoutError:
        return True
    except OSError:
        return False
    return True
