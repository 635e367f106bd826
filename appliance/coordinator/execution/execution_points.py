"""The recovery points of one execution: how they are numbered, who makes them, and when they are complete."""

import os
import time
from collections.abc import Callable
from typing import Final

from appliance.coordinator.execution.recovery_points import RecoveryPoint, RecoveryPoints
from appliance.coordinator.nodes.job_nodes import JobNodes

# Numbers of recovery points: that of the epoch, and these bits for the order within it.
POINT_BITS: Final = 32
FIRST_POINT: Final = 1
LAST_POINT: Final = (1 << POINT_BITS) - 1
GIVE_UP_INTERVALS: Final = 10  # after which one that is not complete was asked for too late, or is too much for a disk
INTERVAL_VARIABLE: Final = "WAFERBOX_RECOVERY_SECONDS"


def recovery_seconds() -> float:
    """How long a job runs from one recovery point to the next."""
    return float(os.environ.get(INTERVAL_VARIABLE, "30"))


class NoRecoveryPoint(RuntimeError):
    """Nothing has been kept that the job could go on from."""


class ExecutionPoints:
    """Thread-safe."""

    def __init__(
        self,
        points: RecoveryPoints,
        nodes: JobNodes,
        *,
        execution: int,
        num_steps: int,
        is_received: Callable[[int], bool],
    ) -> None:
        """execution: of the job. is_received(step): whether the client has all that it gets of the steps up to this."""
        self._points = points
        self._nodes = nodes
        self._execution = execution
        self._num_steps = num_steps
        self._is_received = is_received
        self._order = FIRST_POINT
        self._next = 0  # the number of the last that was asked for while steps ran
        self._asked_at = 0.0

    @property
    def complete(self) -> RecoveryPoint:
        """What the job goes on from. Raises NoRecoveryPoint."""
        point = self._points.complete
        if point is None:
            raise NoRecoveryPoint("the states of the job could not be kept anywhere to go on from")
        return point

    @property
    def any_complete(self) -> RecoveryPoint | None:
        """The same, or None."""
        return self._points.complete

    def done_steps(self) -> int:
        """Of this execution, at the point that the job goes on from. Raises NoRecoveryPoint."""
        point = self.complete
        return point.step if point.execution == self._execution else 0

    def make_first(self, epoch: int) -> int:
        """The number of the one to be made before the first step."""
        return self._make(epoch, FIRST_POINT, 0)

    def make_last(self, epoch: int) -> int:
        """The number of the one to be made after the last step."""
        return self._make(epoch, LAST_POINT, self._num_steps)

    def make_next(self, epoch: int, step: int) -> int | None:
        """The number of the one to be made after a step; None while the last is being made: it would be given up."""
        now = time.monotonic()
        if not self._points.is_over(self._next) and now - self._asked_at < GIVE_UP_INTERVALS * recovery_seconds():
            return None
        self._order += 1
        self._next, self._asked_at = self._make(epoch, self._order, step), now
        return self._next

    def has(self, number: int) -> bool:
        """Whether this point, or a later one, is complete; or cannot be."""
        self.settle()
        return self._points.is_over(number)

    def settle(self) -> None:
        """A node has kept something, or the client has got something."""
        self._points.settle(self._execution, self._is_received)

    def input_state(self, worker: str, step: int, state: bytes) -> None:
        """Where a worker's loader stands after a step."""
        self._points.input_state(worker, self._execution, step, state)

    def _make(self, epoch: int, order: int, step: int) -> int:
        topology = self._nodes.topology
        number = (epoch << POINT_BITS) + order
        is_between = 0 < step < self._num_steps
        self._points.make(
            number,
            execution=self._execution,
            step=step,
            keepers=[member.name for member in topology.state_keepers],
            workers=[member.name for member in topology.workers] if is_between else (),
        )
        return number
