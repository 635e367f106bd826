"""What an executor measures about itself."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cstorch.utils.tracker import RateTracker

RESULTS = "profile.json"


class Activity(ABC):
    """One thing that is measured over the steps of an execution; a subclass goes to a DataExecutor."""

    @classmethod
    def name(cls) -> str:
        """What it is called in the results, and as an attribute of the profiler."""
        return cls.__name__

    @abstractmethod
    def update(self, batch_size: int) -> None:
        """A step begins on the CPU, or has ended on the cluster; its batch has so many samples."""

    @abstractmethod
    def compute(self) -> Any:
        """The result so far, fit for JSON."""


class RateTrackerActivity(Activity):
    """Samples per second; `executor.profiler.rate_tracker` of every executor."""

    def __init__(self) -> None:
        self.tracker = RateTracker()

    @classmethod
    def name(cls) -> str:
        return "rate_tracker"

    def update(self, batch_size: int) -> None:
        self.tracker.add(batch_size)

    def compute(self) -> dict[str, float]:
        return {
            "total_samples": self.total_samples,
            "total_time": self.total_time,
            "samples_per_sec": self.samples_per_sec,
        }

    def reset_time(self) -> None:
        """Start the clock now."""
        self.tracker.reset_time()

    @property
    def total_samples(self) -> int:
        """Samples since the first step began."""
        return self.tracker.total_count

    @property
    def total_time(self) -> float:
        """Seconds since the first step began."""
        return self.tracker.elapsed_seconds()

    @property
    def rate(self) -> float:
        """Samples per second since this was last asked, smoothed."""
        return self.tracker.rate()

    @property
    def global_rate(self) -> float:
        """Samples per second since the first step began."""
        return self.tracker.global_rate()

    @property
    def samples_per_sec(self) -> float:
        """As global_rate."""
        return self.global_rate

    @property
    def flops_utilization(self) -> float | None:
        """None: what a simulated wafer could do at most is not known here."""
        return None


class Profiler:
    """Measures the steps of an execution; each activity is an attribute by its name.

    outdir: takes the results.
    activities: beside the RateTrackerActivity.
    """

    def __init__(self, outdir: str | Path, activities: Iterable[type[Activity]] | None = None) -> None:
        self._outdir = Path(outdir)
        kinds: list[type[Activity]] = [RateTrackerActivity, *(activities or ())]
        self._activities = {kind.name(): kind() for kind in kinds}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._activities:
            raise AttributeError(f"the profiler has no activity {name!r}: give its class to the DataExecutor")
        return self._activities[name]

    @property
    def rate_tracker(self) -> RateTrackerActivity:
        """The activity that every profiler has."""
        tracker = self._activities[RateTrackerActivity.name()]
        assert isinstance(tracker, RateTrackerActivity)
        return tracker

    def start(self) -> None:
        """The first step begins now."""
        self.rate_tracker.reset_time()

    def step(self, batch_size: int) -> None:
        """Counts a step."""
        for activity in self._activities.values():
            activity.update(batch_size)

    def record_elapsed(self, seconds: float) -> None:
        """The step that was counted last has ended so many seconds after the first began, by the cluster's clock."""
        self.rate_tracker.tracker.record_elapsed(seconds)

    def write(self) -> None:
        """Leaves the results of all activities in outdir."""
        results = {name: activity.compute() for name, activity in self._activities.items()}
        (self._outdir / RESULTS).write_text(json.dumps(results, indent=2) + "\n")

    # As releases before 2.1 ask for it.

    def total_samples(self) -> int:
        """Samples since the first step began."""
        return self.rate_tracker.total_samples

    def total_time(self) -> float:
        """Seconds since the first step began."""
        return self.rate_tracker.total_time

    def rate(self) -> float:
        """Samples per second since this was last asked, smoothed."""
        return self.rate_tracker.rate

    def global_rate(self) -> float:
        """Samples per second since the first step began."""
        return self.rate_tracker.global_rate
