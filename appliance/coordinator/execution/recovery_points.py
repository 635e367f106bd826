"""The recovery points of a job: what it goes on from when somebody has died."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from wsc.v1 import node_pb2

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
