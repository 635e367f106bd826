"""Whether the vendor's client is still there: it beats, and it calls."""

import threading
import time
from typing import Final

GONE_SECONDS: Final = 6.0  # without a word, after the stream of its beats has broken
BEAT_SECONDS: Final = 45.0  # without a word, while the stream is open: it beats every 10 s
MOST_LEASE_SECONDS: Final = 3600.0  # that a client may ask for instead
IDLE_SECONDS: Final = 90.0  # without a word, while it has no live job: it compiles, or builds an image


class Presence:
    """Of one client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard = time.monotonic()
        self._streams: dict[str, int] = {}  # of beats, that are open; of every live job that has begun to beat
        self._lease_seconds = BEAT_SECONDS

    def heard(self) -> None:
        """It has called."""
        self._heard = time.monotonic()

    def beats(self, job: str) -> None:
        """It has opened a stream of beats for a job."""
        with self._lock:
            self._streams[job] = self._streams.get(job, 0) + 1
        self.heard()

    def lease(self, seconds: int) -> None:
        """It may beat as seldom as this; 0: as the cluster wants it."""
        if seconds > 0:
            self._lease_seconds = min(float(seconds), MOST_LEASE_SECONDS)

    def stream_ended(self, job: str) -> None:
        """A stream of its beats has."""
        with self._lock:
            if job in self._streams:
                self._streams[job] -= 1
        self.heard()

    def forget(self, job: str) -> None:
        """The job has ended: nobody beats for it."""
        with self._lock:
            self._streams.pop(job, None)
        self.heard()

    @property
    def is_gone(self) -> bool:
        """Whether it has been silent for too long."""
        with self._lock:
            counts = list(self._streams.values())
        limit = IDLE_SECONDS if not counts else self._lease_seconds if any(counts) else GONE_SECONDS
        return time.monotonic() - self._heard > limit
