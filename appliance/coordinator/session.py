"""The client's session: what the client is told while the job lasts, and whether it is there at all."""

import queue
import threading
from collections.abc import Callable, Iterator

from interconnect.threads import GuardedTimer
from wsc.v1 import coordinator_pb2

SESSION_SECONDS = 10.0  # until the client must have come


class ClientSession:
    """At most one session, of one client. Thread-safe."""

    def __init__(
        self,
        on_missing: Callable[[str], None],
        on_defect: Callable[[Exception], None],
        seconds: float,
    ) -> None:
        """on_missing(message): no client has come within so many seconds. on_defect(error): of what waits."""
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
        self._timeout.cancel()
        self._messages.put(None)
