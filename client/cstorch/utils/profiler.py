"""What an executor measures about itself."""

from cstorch.utils.tracker import RateTracker


class Profiler:
    """The rate of an execution, in samples per second; an executor has one."""

    def __init__(self) -> None:
        self.rate_tracker = RateTracker()

    def step(self, batch_size: int) -> None:
        """Counts a step."""
        self.rate_tracker.add(batch_size)

    @property
    def total_samples(self) -> int:
        """Samples since the first step began."""
        return self.rate_tracker.total_count

    @property
    def total_time(self) -> float:
        """Seconds since the first step began."""
        return self.rate_tracker.elapsed_seconds()

    def rate(self) -> float:
        """Samples per second, smoothed."""
        return self.rate_tracker.rate()

    def global_rate(self) -> float:
        """Samples per second since the first step began."""
        return self.rate_tracker.global_rate()
