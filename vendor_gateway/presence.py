"""Whether the vendor's client is still there: it beats, and it calls."""

import threading
import time

from waferbox import deadlines


class Presence:
    """Of one client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_call = time.monotonic()
        self._streams: dict[str, int] = {}  # of beats, that are open; of every live job that has begun to beat
        self._unnamed = 0  # streams of beats that are open, and have named no live job
        self._lost = False  # the last of these has ended so
        self._lease_seconds = deadlines.VENDOR_CLIENT.beat

    def note_call(self) -> None:
        """It has called."""
        self._last_call = time.monotonic()

    def opened(self) -> None:
        """It has opened a stream of beats; which job it is for is said by the first beat, after 10 s."""
        with self._lock:
            self._unnamed += 1
            self._lost = False
        self.note_call()

    def closed(self) -> None:
        """A stream has ended before it has named a job."""
        with self._lock:
            self._unnamed -= 1
            self._lost = self._unnamed == 0
        self.note_call()

    def named(self) -> None:
        """A stream has named a job: from now on it is one of that job's."""
        with self._lock:
            self._unnamed -= 1

    def beats(self, job: str) -> None:
        """A stream beats for a job from now on."""
        with self._lock:
            self._streams[job] = self._streams.get(job, 0) + 1
        self.note_call()

    def lease(self, seconds: int) -> None:
        """It may beat as seldom as this; 0: as the cluster wants it."""
        if seconds > 0:
            self._lease_seconds = min(float(seconds), deadlines.VENDOR_CLIENT.longest_lease)

    def stream_ended(self, job: str) -> None:
        """A stream of its beats has."""
        with self._lock:
            if job in self._streams:
                self._streams[job] -= 1
        self.note_call()

    def forget(self, job: str) -> None:
        """The job has ended: nobody beats for it."""
        with self._lock:
            self._streams.pop(job, None)
        self.note_call()

    def is_gone(self, *, has_job: bool) -> bool:
        """Whether it has been silent for too long; has_job: a job of its has not ended."""
        with self._lock:
            counts = list(self._streams.values())
            is_connected = any(counts) or self._unnamed > 0
            is_expected = bool(counts) or (has_job and (is_connected or self._lost))
        limit = deadlines.VENDOR_CLIENT.idle
        if is_expected:
            limit = self._lease_seconds if is_connected else deadlines.VENDOR_CLIENT.gone
        return time.monotonic() - self._last_call > limit
