"""Schedules of steps, such as the steps on which checkpoints are taken, and how many steps a run takes."""

import builtins
from bisect import bisect_right
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from itertools import pairwise

from cstorch.errors import ConfigurationError

# --- Schedules of steps, such as the steps on which checkpoints are taken ---------------------------------------------


@dataclass
class Schedule:
    """A union of ranges of steps. Steps count from 0.

    Args:
        intervals: The ranges, in order and apart from each other; an empty list is a schedule without steps.

    Raises:
        TypeError: An interval is no Range.
        ValueError: Two ranges overlap, or stand in another order.

    Example:
        Checkpoints after steps 1 to 10, then after each hundredth::

            Schedule = cstorch.utils.data.Schedule
            schedule = Schedule([Schedule.Range(0, 10), Schedule.Range(99, 1000, 100)])

    Reference: release 2.10, `cerebras.pytorch.utils.data`.
    """

    @dataclass
    class Range:
        """The steps start, start + step, ... below end. It can be changed.

        Args:
            start: The first step.
            end: The end, exclusive.
            step: The distance of two steps, at least 1.
            include_last: Whether `end - 1` is a step too.

        Raises:
            ValueError: Not 0 <= start < end, or step is less than 1.
        """

        start: int
        end: int
        step: int = 1
        include_last: bool = False

        def __post_init__(self) -> None:
            if not 0 <= self.start < self.end:
                raise ValueError(f"a range needs 0 <= start < end, got start={self.start} and end={self.end}")
            if self.step < 1:
                raise ValueError(f"a range needs a step of at least 1, got {self.step}")

        def __len__(self) -> int:
            return len(self.range()) + self._adds_last

        def __iter__(self) -> Iterator[int]:
            yield from self.range()
            if self._adds_last:
                yield self.end - 1

        @property
        def _adds_last(self) -> bool:
            return self.include_last and self.end - 1 not in self.range()

        def range(self) -> builtins.range:
            """Returns the steps as a range, without the one that `include_last` adds."""
            return builtins.range(self.start, self.end, self.step)

        @property
        def final_step(self) -> int:
            """The last step."""
            return self.end - 1 if self.include_last else self.range()[-1]

        def match(self, index: int) -> bool:
            """Whether the range has a step.

            Args:
                index: The step, from 0.
            """
            return index in self.range() or (self.include_last and index == self.end - 1)

        def next_immediate_step(self, target: int) -> int:
            """Returns the first step of the range that is not before another.

            Args:
                target: The other step, from 0.

            Raises:
                ValueError: There is none.
            """
            if target > self.final_step:
                raise ValueError(f"no step of the range is at {target} or later: its last is {self.final_step}")
            following = self.start + max(0, -(-(target - self.start) // self.step)) * self.step
            return min(following, self.final_step)

    intervals: list[Range]

    def __post_init__(self) -> None:
        for interval in self.intervals:
            if not isinstance(interval, Schedule.Range):
                raise TypeError(f"a schedule is made of Schedule.Range, not {type(interval).__name__}")
        for before, after in pairwise(self.intervals):
            if after.start < before.end:
                raise ValueError(f"the ranges of a schedule must not overlap, and stand in order: {self.intervals}")

    @classmethod
    def every(cls, steps: int, num_steps: int) -> "Schedule":
        """Returns the schedule of every k-th step, counted from 1, and the last.

        Args:
            steps: k.
            num_steps: The number of steps of the execution.
        """
        first = min(steps - 1, num_steps - 1)
        return cls([cls.Range(first, num_steps, steps, include_last=True)])

    def __len__(self) -> int:
        return sum(map(len, self.intervals))

    def __iter__(self) -> Iterator[int]:
        for interval in self.intervals:
            yield from interval

    def range(self) -> list[builtins.range]:
        """Returns the `range` of each interval."""
        return [interval.range() for interval in self.intervals]

    @property
    def start(self) -> int | None:
        """The first step; None for a schedule without steps."""
        return self.intervals[0].start if self.intervals else None

    @property
    def final_step(self) -> int | None:
        """The last step; None for a schedule without steps."""
        return self.intervals[-1].final_step if self.intervals else None

    def match(self, index: int) -> bool:
        """Whether the schedule has a step.

        Args:
            index: The step, from 0.
        """
        following = bisect_right(self.intervals, index, key=lambda interval: interval.start)
        return following > 0 and self.intervals[following - 1].match(index)

    def next_immediate_step(self, target: int) -> int | None:
        """Returns the first step of the schedule that is not before another; None for a schedule without steps.

        Args:
            target: The other step, from 0.

        Raises:
            ValueError: The last step is before `target`.
        """
        for interval in self.intervals:
            if target <= interval.final_step:
                return interval.next_immediate_step(target)
        if self.intervals:
            raise ValueError(f"no step of the schedule is at {target} or later: its last is {self.final_step}")
        return None


# --- How many steps a run takes ---------------------------------------------------------------------------------------


def compute_num_steps(
    dataloader: Sized,
    initial_step: int = 0,
    num_steps: int | None = None,
    max_steps: int | None = None,
    num_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    grad_accum_steps: int = 1,
) -> int:
    """Returns the number of steps that are left to do.

    Args:
        dataloader: Its length is that of an epoch in batches, if `steps_per_epoch` is not given.
        initial_step: The steps done before.
        num_steps: The steps to do; excludes `num_epochs` and `steps_per_epoch`.
        max_steps: The greatest number of steps, with those done before.
        num_epochs: The epochs to do; without `num_steps`, `max_steps` and `num_epochs` it is one.
        steps_per_epoch: The steps of an epoch.
        grad_accum_steps: The batches of a step.

    Raises:
        ConfigurationError: A number is out of range, two exclude each other, or no step is left.
        TypeError: The length of the dataloader is needed, and it has none.

    Reference: release 2.10, `cerebras.pytorch.utils.data`.
    """
    numbers = {
        "num_steps": num_steps,
        "max_steps": max_steps,
        "num_epochs": num_epochs,
        "steps_per_epoch": steps_per_epoch,
        "grad_accum_steps": grad_accum_steps,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}")
    if initial_step < 0:
        raise ConfigurationError(f"initial_step must not be negative, got {initial_step}")
    if num_steps is not None and (num_epochs is not None or steps_per_epoch is not None):
        raise ConfigurationError("num_steps excludes num_epochs and steps_per_epoch: give the one or the others")
    left = [] if max_steps is None else [max_steps - initial_step]
    if num_steps is not None:
        left.append(num_steps)
    elif num_epochs is not None or steps_per_epoch is not None or max_steps is None:
        of_epoch = len(dataloader) // grad_accum_steps if steps_per_epoch is None else steps_per_epoch
        left.append((num_epochs or 1) * of_epoch)
    if min(left) < 1:
        raise ConfigurationError(f"no step is left to do: initial_step={initial_step}, max_steps={max_steps}")
    return min(left)
