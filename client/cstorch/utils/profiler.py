"""The measurements of an executor."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cstorch.utils.tracker import RateTracker

logger = logging.getLogger("cstorch.execution")

RESULTS = "profile.json"


class Activity(ABC):
    """The base class of measurements over the steps of an execution. A DataExecutor takes subclasses.

    Reference: release 2.10, `cerebras.pytorch.utils.profiler`.
    """

    @classmethod
    def name(cls) -> str:
        """Returns the name of the activity in the results and as an attribute of the profiler."""
        return cls.__name__

    @abstractmethod
    def update(self, batch_size: int) -> None:
        """Is called when a step begins on the CPU, or has ended on the cluster.

        Args:
            batch_size: The number of samples of its batch.
        """

    @abstractmethod
    def compute(self) -> Any:
        """Returns the result so far, fit for JSON."""


class RateTrackerActivity(Activity):
    """Samples per second: `executor.profiler.rate_tracker` of every executor.

    Reference: release 2.10, `cerebras.pytorch.utils.profiler`.
    """

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
        """Starts the clock now."""
        self.tracker.reset_time()

    @property
    def total_samples(self) -> int:
        """The samples since the first step began."""
        return self.tracker.total_count

    @property
    def total_time(self) -> float:
        """The seconds since the first step began."""
        return self.tracker.elapsed_seconds()

    @property
    def rate(self) -> float:
        """The samples per second since the last query, smoothed."""
        return self.tracker.rate()

    @property
    def global_rate(self) -> float:
        """The samples per second since the first step began."""
        return self.tracker.global_rate()

    @property
    def samples_per_sec(self) -> float:
        """The same as `global_rate`."""
        return self.global_rate

    @property
    def flops_utilization(self) -> float | None:
        """None: the peak of a simulated wafer is not known."""
        return None


class Profiler:
    """The measurements of an execution. Each activity is an attribute by its name.

    Args:
        outdir: The folder for the results.
        activities: Classes of activities besides the RateTrackerActivity.

    Reference: release 2.10, `cerebras.pytorch.utils.profiler`.
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
        """Notes that the first step begins now."""
        self.rate_tracker.reset_time()

    def step(self, batch_size: int) -> None:
        """Counts a step.

        Args:
            batch_size: The number of samples of its batch.
        """
        for activity in self._activities.values():
            activity.update(batch_size)

    def record_elapsed(self, seconds: float) -> None:
        """Notes the end of the step that was counted last, by the cluster's clock.

        Args:
            seconds: The seconds since the first step began.
        """
        self.rate_tracker.tracker.record_elapsed(seconds)

    def write(self) -> None:
        """Writes the results of all activities into the folder; a warning is logged if it cannot be written."""
        results = {name: activity.compute() for name, activity in self._activities.items()}
        try:
            (self._outdir / RESULTS).write_text(json.dumps(results, indent=2) + "\n")
        except OSError as error:
            logger.warning("The rates of the execution are not in %s: %s", self._outdir / RESULTS, error.strerror)

    # The form of releases before 2.1.

    def total_samples(self) -> int:
        """Returns the samples since the first step began."""
        return self.rate_tracker.total_samples

    def total_time(self) -> float:
        """Returns the seconds since the first step began."""
        return self.rate_tracker.total_time

    def rate(self) -> float:
        """Returns the samples per second since the last call, smoothed."""
        return self.rate_tracker.rate

    def global_rate(self) -> float:
        """Returns the samples per second since the first step began."""
        return self.rate_tracker.global_rate
