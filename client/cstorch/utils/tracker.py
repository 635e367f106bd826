"""How many samples per second."""

from cstorch._internal import step_clock


class RateTracker:
    """Counts samples and says at what rate they come, by its own clock or by that of who makes them.

    smooth_factor: weight of the rate before in what `rate` returns, from 0 (none) to 1 (exclusive); None: 0.4.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._smooth_factor = 0.4 if smooth_factor is None else smooth_factor
        if not 0 <= self._smooth_factor < 1:
            raise ValueError(f"smooth_factor must be at least 0 and less than 1, not {smooth_factor}")
        self.reset()

    def reset(self) -> None:
        """Forget everything; the clock starts now."""
        self._total_count = 0
        self.reset_time()

    def reset_time(self, offset: float = 0) -> None:
        """Start the clock now, in a closure at the begin of its step, or `offset` seconds before.

        `total_count` and `global_rate` keep what was counted.
        """
        self._start = step_clock.began() - offset
        self._told: float | None = None
        self._last_query = 0.0
        self._count_since_query = 0
        self._last_rate: float | None = None

    def add(self, count: int) -> None:
        """Count more samples."""
        self._total_count += count
        self._count_since_query += count

    def record_elapsed(self, seconds: float) -> None:
        """The samples counted so far are done so many seconds after the first step began; from now on such times count.

        What is asked when several have come at once is not when they were made.
        """
        self._told = seconds

    @property
    def total_count(self) -> int:
        """Samples since the last reset."""
        return self._total_count

    def rate(self) -> float:
        """Samples per second since the last call of this method, smoothed with what that returned."""
        now = self.elapsed_seconds()
        elapsed = now - self._last_query
        rate = self._count_since_query / elapsed if elapsed > 0 else 0.0
        if self._last_rate is not None:
            rate = self._smooth_factor * self._last_rate + (1 - self._smooth_factor) * rate
        self._last_query = now
        self._count_since_query = 0
        self._last_rate = rate
        return rate

    def global_rate(self) -> float:
        """Samples per second since the clock started."""
        elapsed = self.elapsed_seconds()
        return self._total_count / elapsed if elapsed > 0 else 0.0

    def elapsed_seconds(self) -> float:
        """Seconds since the clock started."""
        return step_clock.now() - self._start if self._told is None else self._told
