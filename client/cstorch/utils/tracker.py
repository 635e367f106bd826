"""Rates in samples per second."""

from typing import Final

from cstorch._internal import step_clock

# Results of several steps arrive together where the cluster is faster than the processor that receives them: the time
# between two of them is then no step's.
LEAST_SECONDS: Final = 0.1


class RateTracker:
    """Counts samples and computes their rate, by its own clock or by the cluster's.

    Args:
        smooth_factor: The weight of the previous rate in what `rate` returns, from 0 to less than 1; None: 0.4.

    Raises:
        ValueError: `smooth_factor` is out of range.

    Reference: release 2.10, `cerebras.pytorch.utils.profiler`.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._smooth_factor = 0.4 if smooth_factor is None else smooth_factor
        if not 0 <= self._smooth_factor < 1:
            raise ValueError(f"smooth_factor must be at least 0 and less than 1, not {smooth_factor}")
        self.reset()

    def reset(self) -> None:
        """Sets all counts to 0; the clock starts now."""
        self._total_count = 0
        self.reset_time()

    def reset_time(self, offset: float = 0) -> None:
        """Starts the clock now, or in a closure at the begin of its step. `total_count` stays as it is.

        Args:
            offset: The seconds that the clock starts earlier.
        """
        self._start = step_clock.began() - offset
        self._recorded_seconds: float | None = None
        self._last_query = 0.0
        self._count_since_query = 0
        self._last_rate: float | None = None

    def add(self, count: int) -> None:
        """Counts samples.

        Args:
            count: The number of samples.
        """
        self._total_count += count
        self._count_since_query += count

    def record_elapsed(self, seconds: float) -> None:
        """Notes when the samples counted so far were done.

        From then on only these times count, not the tracker's own clock. Values of several steps may arrive at once, so
        the time of their arrival is not that of the steps.

        Args:
            seconds: The seconds since the first step began.
        """
        self._recorded_seconds = seconds

    @property
    def total_count(self) -> int:
        """The samples since the last reset."""
        return self._total_count

    def rate(self) -> float:
        """Returns the samples per second since the last call, smoothed with the result of that call.

        If less than a tenth of a second has passed since, it returns the same again, and the samples count for the next
        call; at the begin that is `global_rate`.
        """
        now = self.elapsed_seconds()
        elapsed = now - self._last_query
        if elapsed < LEAST_SECONDS:
            return self.global_rate() if self._last_rate is None else self._last_rate
        rate = self._count_since_query / elapsed
        if self._last_rate is not None:
            rate = self._smooth_factor * self._last_rate + (1 - self._smooth_factor) * rate
        self._last_query = now
        self._count_since_query = 0
        self._last_rate = rate
        return rate

    def global_rate(self) -> float:
        """Returns the samples per second since the clock started."""
        elapsed = self.elapsed_seconds()
        return self._total_count / elapsed if elapsed > 0 else 0.0

    def elapsed_seconds(self) -> float:
        """Returns the seconds since the clock started."""
        return step_clock.now() - self._start if self._recorded_seconds is None else self._recorded_seconds
