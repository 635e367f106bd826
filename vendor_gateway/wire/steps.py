"""Steps: the vendor counts them from 0, Waferbox from 1."""

from collections.abc import Sequence
from typing import Final

from vendor_wire import appliance_pb2

MAX_STEPS: Final = 1 << 40
MAX_CHECKPOINTS: Final = 1 << 20


def checkpoint_steps(schedule: appliance_pb2.Schedule, num_steps: int) -> Sequence[int]:
    """The steps of a schedule, from 1, ascending. ValueError if there are too many, or they are none of the run."""
    steps: set[int] = set()
    for interval in schedule.intervals:
        if not 0 <= interval.start < interval.end <= num_steps or not interval.step:
            raise ValueError(f"no steps of a run of {num_steps} are from {interval.start} to {interval.end}")
        if (interval.end - interval.start) // interval.step > MAX_CHECKPOINTS:
            raise ValueError(f"more than {MAX_CHECKPOINTS} checkpoints are too many")
        steps.update(range(interval.start, interval.end, interval.step))
        if interval.include_last:
            steps.add(interval.end - 1)
    return [step + 1 for step in sorted(steps)]
