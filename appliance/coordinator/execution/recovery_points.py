"""The recovery points of a job, from which it is continued after a death; and those of one execution: their numbers,
who makes them, when they are complete.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from appliance.coordinator.nodes.job_nodes import JobMembers
from waferbox import settings
from wsc.v1 import node_pb2

# --- The recovery points of a job: what it goes on from when somebody has died ----------------------------------------


# Numbers of recovery points: that of the epoch, and these bits for the order within it.
POINT_BITS: Final = 32
FIRST_POINT: Final = 1
LAST_POINT: Final = (1 << POINT_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """All states as they were after a step, with everybody who keeps states, under this number."""

    number: int
    execution: int  # of the job, from 1
    step: int  # of the execution; 0: before its first
    input_states: Sequence[bytes]  # of the loaders of all workers, wafer by wafer; empty: they skip what they have done

    @property
    def is_last(self) -> bool:
        """Whether it was made after the last step of its execution."""
        return self.number & LAST_POINT == LAST_POINT


@dataclass(slots=True, kw_only=True)
class _Making:
    number: int
    execution: int
    step: int
    keepers: frozenset[str]  # members
    workers: Sequence[str]
    kept: dict[str, node_pb2.RecoveryPointKept] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)  # members of whose files copies are being made
    input_states: dict[str, bytes] = field(default_factory=dict)
    waits_for_inputs: bool  # whether it is not complete without the states of all workers' loaders

    @property
    def has_inputs(self) -> bool:
        """Whether it has all states of loaders that it waits for."""
        return not self.waits_for_inputs or self.input_states.keys() >= set(self.workers)

    @property
    def is_kept(self) -> bool:
        """Whether everybody has said that he keeps his states."""
        return self.keepers <= self.kept.keys()


class RecoveryPoints:
    """The last one that is complete, and those in the making. Thread-safe."""

    def __init__(
        self,
        complete: RecoveryPoint | None,
        copy: Callable[[Mapping[str, node_pb2.RecoveryPointKept]], Collection[str]],
        on_complete: Callable[[RecoveryPoint], None],
        on_forgotten: Callable[[int], None],
    ) -> None:
        """complete: one that there is already.

        copy(kept): these members keep a point, as they have said: has copies made if they are all; returns the
        members of whose files.
        on_complete(point): those before this one are not wanted any more. on_forgotten(number): all before this number
        are not, and there is none.
        """
        self._copy = copy
        self._on_complete = on_complete
        self._on_forgotten = on_forgotten
        self._lock = threading.Lock()
        self._complete = complete
        self._making: dict[int, _Making] = {}
        self._put_back: dict[str, node_pb2.RecoveryPointKept] = {}  # who has gone back to the one that is complete

    @property
    def complete(self) -> RecoveryPoint | None:
        """What the job goes on from."""
        return self._complete

    def make(
        self,
        number: int,
        *,
        execution: int,
        step: int,
        keepers: Iterable[str],
        workers: Iterable[str],
        waits_for_inputs: bool = False,
    ) -> None:
        """A point is to be made. keepers: of states. workers: whose loaders' states belong to it, wafer by wafer.

        waits_for_inputs: whether it is not complete without these.
        """
        making = _Making(
            number=number,
            execution=execution,
            step=step,
            keepers=frozenset(keepers),
            workers=tuple(workers),
            waits_for_inputs=waits_for_inputs,
        )
        with self._lock:
            self._making[number] = making

    def give_up(self) -> None:
        """Those in the making will not be complete: somebody has died."""
        with self._lock:
            self._making.clear()
            self._put_back.clear()

    def kept(self, member: str, kept: node_pb2.RecoveryPointKept) -> None:
        """A member keeps its states."""
        with self._lock:
            making = self._making.get(kept.recovery_point)
            if making is not None:
                making.kept[member] = kept
                if making.is_kept:
                    making.awaited.update(self._copy(making.kept))
            elif self._complete is not None and kept.recovery_point == self._complete.number:
                # A copy may have been lost with whoever died.
                self._put_back[member] = kept
                self._copy(self._put_back)

    def copied(self, member: str, number: int) -> None:
        """There is a copy of a member's file, or there will be none."""
        with self._lock:
            if number in self._making:
                self._making[number].awaited.discard(member)

    def given_up(self, number: int) -> None:
        """A member cannot keep its states: the point is waited for no longer, and an earlier one stays."""
        with self._lock:
            self._making.pop(number, None)

    def forget(self, before: int) -> None:
        """If the last that is complete has a lower number, the job cannot go on from it any more."""
        with self._lock:
            if self._complete is None or self._complete.number < before:
                self._on_forgotten(before)  # before anybody counts on steps that follow
                self._complete = None

    def is_over(self, number: int) -> bool:
        """Whether a point is not being made any more: it is complete, or a later one is, or it was given up."""
        return number not in self._making

    def input_state(self, member: str, execution: int, step: int, state: bytes) -> None:
        """Where a worker's loader stands after a step."""
        with self._lock:
            for making in self._making.values():
                if (making.execution, making.step) == (execution, step):
                    making.input_states[member] = state

    def settle(self, execution: int, is_received: Callable[[int], bool]) -> None:
        """Complete what lacks nothing.

        is_received(step): whether all that the client gets of the steps of this execution up to this one is here.
        """
        with self._lock:
            ready = [
                making
                for making in self._making.values()
                if making.is_kept
                and making.has_inputs
                and not making.awaited
                and (making.execution != execution or is_received(making.step))
            ]
            if not ready:
                return
            making = max(ready, key=lambda each: each.number)
            number = making.number
            input_states = [making.input_states.get(worker, b"") for worker in making.workers]
            point = RecoveryPoint(
                number=number,
                execution=making.execution,
                step=making.step,
                input_states=input_states if all(input_states) else (),
            )
            self._on_complete(point)  # before anybody counts on it
            self._complete = point
            self._making = {later: each for later, each in self._making.items() if later > number}


# ----------------------------------------------------------------------------------------------------------------------
# The recovery points of one execution: how they are numbered, who makes them, and when they are complete


GIVE_UP_INTERVALS: Final = 10  # after which one that is not complete was asked for too late, or is too much for a disk


class NoRecoveryPoint(RuntimeError):
    """Nothing has been kept that the job could go on from."""


class ExecutionPoints:
    """Thread-safe."""

    def __init__(
        self,
        points: RecoveryPoints,
        nodes: JobMembers,
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
        patience = GIVE_UP_INTERVALS * settings.RECOVERY_SECONDS.get()
        is_early = not self._points.is_over(self._next) and now - self._asked_at < patience
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
