"""The recovery points of one execution: how they are numbered, who makes them, and when they are complete."""

import os
import time
from collections.abc import Callable
from typing import Final

from appliance.coordinator.execution.recovery_points import (
    FIRST_POINT,
    LAST_POINT,
    POINT_BITS,
    RecoveryPoint,
    RecoveryPoints,
)
from appliance.coordinator.nodes.job_nodes import JobNodes
from wsc.v1 import node_pb2

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
        follows_left: bool,
        num_steps: int,
        wants_input_states: bool,
        is_received: Callable[[int], bool],
    ) -> None:
        """execution: of the job. follows_left: whether the one before it was left by its client before its end.

        wants_input_states: whether the client wants to know where the loaders stand after the last step.
        is_received(step): whether the client has all that it gets of the steps up to this.
        """
        self._points = points
        self._nodes = nodes
        self._execution = execution
        self._follows_left = follows_left
        self._num_steps = num_steps
        self._wants_input_states = wants_input_states
        self._is_received = is_received
        self._order = FIRST_POINT
        self._next = 0  # the number of the last that was asked for while steps ran
        self._asked_at = 0.0

    def usable(self) -> RecoveryPoint:
        """What the execution goes on from: a point of its own, or the end of the one before it.

        Raises:
            NoRecoveryPoint: what there is, if anything, has states that are not those of this execution.
        """
        point = self._points.complete
        if point is not None:
            is_of_last = point.execution == self._execution - 1
            if point.execution == self._execution or (is_of_last and (point.is_last or self._follows_left)):
                return point
        raise NoRecoveryPoint("the states of the job could not be kept anywhere to go on from")

    def usable_start(self) -> RecoveryPoint:
        """What an execution begins with of which no step counts yet. Raises as usable."""
        point = self.usable()
        if self.done_steps(point):
            raise NoRecoveryPoint("only those after some of its steps are kept")
        return point

    def has_start(self) -> bool:
        """Whether the end of the execution before is kept: what this one begins with, if nothing is written."""
        point = self._points.complete
        return point is not None and point.is_last and point.execution == self._execution - 1

    def done_steps(self, point: RecoveryPoint) -> int:
        """Of this execution, at a point that is usable."""
        return point.step if point.execution == self._execution else 0

    def has_end(self) -> bool:
        """Whether the states after the last step of this execution are kept."""
        point = self._points.complete
        return point is not None and point.is_last and point.execution == self._execution

    def forget_before(self, number: int) -> None:
        """Points before this one are not to be gone on from: the states are others by now."""
        self._points.forget(number)

    def make_first(self, epoch: int) -> int:
        """The number of the one to be made before the first step."""
        return self._make(epoch, FIRST_POINT, 0)

    def make_last(self, epoch: int) -> int:
        """The number of the one to be made after the last step."""
        return self._make(epoch, LAST_POINT, self._num_steps)

    def make_next(self, epoch: int, step: int) -> bool:
        """Have one made after this step or soon after; False if there is no such step between the first and the last.

        False as well while the one before is being made: it would be given up.
        """
        topology = self._nodes.topology
        step = -(-step // topology.num_workers_per_wafer) * topology.num_workers_per_wafer
        now = time.monotonic()
        is_early = (
            not self._points.is_over(self._next) and now - self._asked_at < GIVE_UP_INTERVALS * recovery_seconds()
        )
        if step >= self._num_steps or is_early:
            return False
        self._order += 1
        self._next, self._asked_at = self._make(epoch, self._order, step), now
        keep = node_pb2.KeepRecoveryPoint(execution=epoch, step=step, recovery_point=self._next)
        members = [*topology.state_keepers, *topology.workers]
        self._nodes.send(members, lambda _: node_pb2.AttachRequest(keep_recovery_point=keep))
        return True

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
        # Who goes on from the last supplies no batch: nobody could say any more where the loaders stood.
        waits_for_inputs = order == LAST_POINT and self._wants_input_states
        has_inputs = waits_for_inputs or 0 < step < self._num_steps
        self._points.make(
            number,
            execution=self._execution,
            step=step,
            keepers=[member.name for member in topology.state_keepers],
            workers=[member.name for member in topology.workers] if has_inputs else (),
            waits_for_inputs=waits_for_inputs,
        )
        return number
