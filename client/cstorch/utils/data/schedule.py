"""Schedules of steps, such as the steps on which checkpoints are taken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class Schedule:
    """A union of ranges of steps; steps count from 0.

    Args:
        intervals: the ranges; they may overlap.
    """

    @dataclass(frozen=True, slots=True)
    class Range:
        """start, start + step, ... below end; with include_last also end - 1."""

        start: int
        end: int
        step: int = 1
        include_last: bool = False

        def __post_init__(self) -> None:
            if not 0 <= self.start < self.end:
                raise ValueError(f"a range needs 0 <= start < end, got start={self.start} and end={self.end}")
            if self.step < 1:
                raise ValueError(f"a range needs a step of at least 1, got {self.step}")

        @property
        def final_step(self) -> int:
            """The last step."""
            last = self.end - 1
            return last if self.include_last else last - (last - self.start) % self.step

        def match(self, index: int) -> bool:
            """Whether the range holds this step."""
            if not self.start <= index < self.end:
                return False
            return (index - self.start) % self.step == 0 or (self.include_last and index == self.end - 1)

        def next_immediate_step(self, target: int) -> int | None:
            """The first step of the range that is not before `target`."""
            if target <= self.start:
                return self.start
            following = self.start + -(-(target - self.start) // self.step) * self.step
            if following < self.end:
                return following
            return self.end - 1 if self.include_last and target < self.end else None

    def __init__(self, intervals: Sequence["Schedule.Range"]) -> None:
        self.intervals = list(intervals)
        if not self.intervals:
            raise ValueError("a schedule needs at least one range")
        for interval in self.intervals:
            if not isinstance(interval, Schedule.Range):
                raise TypeError(f"a schedule is made of Schedule.Range, not {type(interval).__name__}")

    @classmethod
    def every(cls, steps: int, num_steps: int) -> "Schedule":
        """Steps `steps`, 2 * `steps`, ... counted from 1, and always the last of `num_steps`."""
        first = min(steps - 1, num_steps - 1)
        return cls([cls.Range(first, num_steps, steps, include_last=True)])

    @property
    def start(self) -> int:
        """The first step."""
        return min(interval.start for interval in self.intervals)

    @property
    def final_step(self) -> int:
        """The last step."""
        return max(interval.final_step for interval in self.intervals)

    def match(self, index: int) -> bool:
        """Whether the step is in the schedule."""
        return any(interval.match(index) for interval in self.intervals)

    def next_immediate_step(self, target: int) -> int | None:
        """The first step of the schedule that is not before `target`; None when there is none."""
        following = [step for interval in self.intervals if (step := interval.next_immediate_step(target)) is not None]
        return min(following, default=None)

    def range(self) -> Iterator[int]:
        """All steps, in order."""
        step = self.next_immediate_step(0)
        while step is not None:
            yield step
            step = self.next_immediate_step(step + 1)
