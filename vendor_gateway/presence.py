"""The presence of a vendor's client, by its heartbeats and calls."""

import threading
import time

from waferbox import deadlines


class Presence:
    """The presence of one client: its last call, and its open streams of heartbeats. Thread-safe.

    The first heartbeat of a stream names the job, and comes 10 s after the stream was opened. Until then the stream is
    unnamed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_call = time.monotonic()
        self._streams: dict[str, int] = {}  # the number of open streams, by live job that had one
        self._unnamed = 0  # the number of open streams that have named no live job
        self._lost = False  # whether the last unnamed stream ended before it named a job
        self._lease_seconds = deadlines.VENDOR_CLIENT.beat

    def note_call(self) -> None:
        """Records a call."""
        self._last_call = time.monotonic()

    def add_unnamed_stream(self) -> None:
        with self._lock:
            self._unnamed += 1
            self._lost = False
        self.note_call()

    def lose_unnamed_stream(self) -> None:
        """Removes a stream that ended before it named a job."""
        with self._lock:
            self._unnamed -= 1
            self._lost = self._unnamed == 0
        self.note_call()

    def remove_unnamed_stream(self) -> None:
        """Removes a stream that has named a job."""
        with self._lock:
            self._unnamed -= 1

    def add_stream(self, job: str) -> None:
        """Adds a stream that has named a job."""
        with self._lock:
            self._streams[job] = self._streams.get(job, 0) + 1
        self.note_call()

    def set_lease(self, seconds: int) -> None:
        """Sets the longest time between two heartbeats; 0: unchanged."""
        if seconds > 0:
            self._lease_seconds = min(float(seconds), deadlines.VENDOR_CLIENT.longest_lease)

    def remove_stream(self, job: str) -> None:
        """Removes a stream that had named a job."""
        with self._lock:
            if job in self._streams:
                self._streams[job] -= 1
        self.note_call()

    def remove_job(self, job: str) -> None:
        """Removes a job that has ended, after which no heartbeats for it are expected."""
        with self._lock:
            self._streams.pop(job, None)
        self.note_call()

    def has_timed_out(self, *, has_job: bool) -> bool:
        """Whether the last call is too long ago. has_job: whether a job of the client has not ended."""
        with self._lock:
            counts = list(self._streams.values())
            is_connected = any(counts) or self._unnamed > 0
            is_expected = bool(counts) or (has_job and (is_connected or self._lost))
        limit = deadlines.VENDOR_CLIENT.idle
        if is_expected:
            limit = self._lease_seconds if is_connected else deadlines.VENDOR_CLIENT.gone
        return time.monotonic() - self._last_call > limit
