"""The recovery points of a job, and the part of them that one execution makes."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from appliance.coordinator.nodes.job_nodes import JobMembers
from waferbox import settings
from waferbox.host.clock import Clock
from wsc.v1 import node_pb2

# --- The recovery points of a job -------------------------------------------------------------------------------------

# The number of a recovery point consists of the epoch's number and, in the lowest bits, the order within the epoch.
POINT_BITS: Final = 32
FIRST_POINT: Final = 1
LAST_POINT: Final = (1 << POINT_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """A complete recovery point: all states of the job after one step, kept by its state keepers under one number."""

    number: int
    execution: int  # number of the execution in the job, from 1
    step: int  # of the execution; 0: before its first
    input_states: Sequence[bytes]  # of all workers' loaders, wafer by wafer; empty: loaders must skip batches
    hosts: Mapping[str, Collection[str]]  # those that have the share of a keeper, by keeper

    @property
    def is_last(self) -> bool:
        """Whether it was made after the last step of its execution."""
        return self.number & LAST_POINT == LAST_POINT


@dataclass(slots=True, kw_only=True)
class _Making:
    """An incomplete recovery point."""

    number: int
    execution: int
    step: int
    keepers: frozenset[str]  # names of the state keepers
    workers: Sequence[str]
    kept: dict[str, node_pb2.RecoveryPointKept] = field(default_factory=dict)  # shares, by keeper
    hosts: dict[str, set[str]] = field(default_factory=dict)  # those that have a share, by keeper
    awaited: set[str] = field(default_factory=set)  # keepers whose shares are being copied
    input_states: dict[str, bytes] = field(default_factory=dict)  # by worker
    waits_for_inputs: bool  # whether it needs the states of all workers' loaders to be complete

    @property
    def has_inputs(self) -> bool:
        """Whether all states of loaders that it needs are known."""
        return not self.waits_for_inputs or self.input_states.keys() >= set(self.workers)

    @property
    def is_kept(self) -> bool:
        """Whether all state keepers have written their shares."""
        return self.keepers <= self.kept.keys()


class RecoveryPoints:
    """The recovery points of a job: the last complete one, and later, incomplete ones."""

    def __init__(
        self,
        complete: RecoveryPoint | None,
        copy: Callable[[Mapping[str, node_pb2.RecoveryPointKept]], Collection[str]],
        on_complete: Callable[[RecoveryPoint], None],
        on_forgotten: Callable[[int], None],
    ) -> None:
        """Begins with the point of an earlier incarnation, if there is one.

        Args:
            complete: the last complete point; None: none.
            copy: called with the shares, by keeper, of a point; orders copies of them if all keepers have written
                theirs. Returns the names of the keepers whose shares are copied.
            on_complete: called with a point that is complete: earlier ones can be removed.
            on_forgotten: called with a number when no point is usable: those before the number can be removed.
        """
        self._copy = copy
        self._on_complete = on_complete
        self._on_forgotten = on_forgotten
        self._complete = complete
        # The hosts that have a share of the complete point, by keeper: those that restored it as well.
        self._hosts = {} if complete is None else {keeper: set(hosts) for keeper, hosts in complete.hosts.items()}
        self.is_given_up = False  # whether a share of a point after the complete one could not be written
        self._making: dict[int, _Making] = {}
        self._restored: dict[str, node_pb2.RecoveryPointKept] = {}  # shares of the complete point, by keeper

    @property
    def complete(self) -> RecoveryPoint | None:
        """The point that the job would resume from; None: none."""
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
        """Begins a point.

        Args:
            number: its number.
            execution: number of its execution.
            step: of the execution, after which it is taken.
            keepers: names of the state keepers.
            workers: names of the workers whose loaders' states belong to it, wafer by wafer.
            waits_for_inputs: whether it is complete only with these states.
        """
        making = _Making(
            number=number,
            execution=execution,
            step=step,
            keepers=frozenset(keepers),
            workers=tuple(workers),
            waits_for_inputs=waits_for_inputs,
        )
        self._making[number] = making

    def give_up(self) -> None:
        """Discards unfinished points after the death of a node."""
        self._making.clear()
        self._restored.clear()

    def covering(self, hosts: Mapping[str, str]) -> Sequence[str]:
        """Returns members on whose hosts all shares of the complete point are that any of the hosts has.

        Args:
            hosts: of members, by name; the first that have a share are chosen.
        """
        uncovered = list(self._hosts.values())
        chosen = []
        for member, host in hosts.items():
            others = [holders for holders in uncovered if host not in holders]
            if len(others) < len(uncovered):
                chosen.append(member)
                uncovered = others
        return chosen

    def kept(self, member: str, host: str, kept: node_pb2.RecoveryPointKept) -> None:
        """Notes that a state keeper on a host has written its share, or has restored it."""
        making = self._making.get(kept.recovery_point)
        if making is not None:
            making.kept[member] = kept
            making.hosts.setdefault(member, set()).add(host)
            if making.is_kept:
                making.awaited.update(self._copy(making.kept))
        elif self._complete is not None and kept.recovery_point == self._complete.number:
            # A restored point: its copies may have been lost with the dead node.
            self._restored[member] = kept
            self._hosts.setdefault(member, set()).add(host)
            self._copy(self._restored)

    def copied(self, member: str, number: int, host: str) -> None:
        """Notes that a member's share was copied to a host; empty: it cannot be copied."""
        making = self._making.get(number)
        if making is not None:
            making.awaited.discard(member)
            hosts = making.hosts
        elif self._complete is not None and number == self._complete.number:
            hosts = self._hosts
        else:
            return
        if host:
            hosts.setdefault(member, set()).add(host)

    def given_up(self, number: int) -> None:
        """Discards a point whose share a member could not write; the earlier one stays."""
        self.is_given_up = True
        self._making.pop(number, None)

    def forget(self, before: int) -> None:
        """Discards the complete point if its number is lower than `before`: its states are outdated."""
        if self._complete is None or self._complete.number < before:
            self._on_forgotten(before)  # recorded first: a successor must not resume from it
            self._complete = None

    def pass_on(self, execution: int) -> None:
        """Makes the complete point that of the next execution, which ends before its first step."""
        assert self._complete is not None
        point = replace(self._complete, execution=execution, step=0, input_states=())
        self._on_complete(point)
        self._complete = point

    def is_over(self, number: int) -> bool:
        """Whether a point is no longer being made: it or a later one is complete, or it was given up."""
        return number not in self._making

    def input_state(self, member: str, execution: int, step: int, state: bytes) -> None:
        """Notes the state of a worker's loader after a step."""
        for making in self._making.values():
            if (making.execution, making.step) == (execution, step):
                making.input_states[member] = state

    def settle(self, execution: int, is_received: Callable[[int], bool]) -> None:
        """Completes the latest point that lacks nothing.

        Args:
            execution: number of the current execution.
            is_received: whether the client has all outputs and checkpoints of this execution up to a step: steps before
                a point are not run again, so the client must not need them.
        """
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
            hosts=making.hosts,
        )
        self._on_complete(point)  # recorded before anything relies on it
        self._complete, self._hosts, self.is_given_up = point, making.hosts, False
        self._making = {later: each for later, each in self._making.items() if later > number}


# --- The recovery points of one execution -----------------------------------------------------------------------------

# Intervals after which an incomplete point is given up: it was requested too late, or the disks are too slow for it.
GIVE_UP_INTERVALS: Final = 10


class NoRecoveryPoint(RuntimeError):
    """Raised when there is no recovery point that the job could resume from."""


class ExecutionPoints:
    """Makes the recovery points of one execution, and decides which of the job it can resume from."""

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
        clock: Clock,
    ) -> None:
        """Makes no point yet.

        Args:
            points: the recovery points of the job.
            nodes: the members of the job.
            execution: number of the execution in the job.
            follows_left: whether the client left the previous execution before its end.
            num_steps: of the execution.
            wants_input_states: whether the client receives the states of the loaders after the last step.
            is_received: whether the client has all outputs and checkpoints up to a step.
            clock: of this host.
        """
        self._points = points
        self._nodes = nodes
        self._execution = execution
        self._follows_left = follows_left
        self._num_steps = num_steps
        self._wants_input_states = wants_input_states
        self._is_received = is_received
        self._clock = clock
        self._order = FIRST_POINT
        self._next = 0  # number of the last point that was requested while steps ran
        self._requested_at = 0.0  # its time, as of Clock.monotonic

    def stop_after(self, step: int) -> None:
        """Makes this the last step; points of an epoch that goes further are given up."""
        self._num_steps = step
        self._points.give_up()

    def usable(self) -> RecoveryPoint:
        """The point to resume from: one of this execution, or the end of the previous one.

        Raises:
            NoRecoveryPoint: there is none, or only one with states of an earlier execution.
        """
        point = self._points.complete
        if point is not None:
            is_of_last = point.execution == self._execution - 1
            if point.execution == self._execution or (is_of_last and (point.is_last or self._follows_left)):
                return point
        why = ": the last could not be written, as a warning has said" if self._points.is_given_up else ""
        raise NoRecoveryPoint(f"no recovery point has the states that the job would resume from{why}")

    def usable_start(self) -> RecoveryPoint:
        """The point with the states before the first step. Raises as usable."""
        point = self.usable()
        if self.done_steps(point):
            raise NoRecoveryPoint("the only recovery point was made after some of its steps")
        return point

    def has_start(self) -> bool:
        """Whether the end of the previous execution is kept, where this one begins unless the client writes states."""
        point = self._points.complete
        return point is not None and point.is_last and point.execution == self._execution - 1

    def done_steps(self, point: RecoveryPoint) -> int:
        """Steps of this execution that are done at a usable point."""
        return point.step if point.execution == self._execution else 0

    def end_at(self, point: RecoveryPoint) -> None:
        """Makes a usable point that of the end, where the last step is done."""
        if point.execution != self._execution:
            self._points.pass_on(self._execution)

    def has_end(self) -> bool:
        """Whether the states after the last step of this execution are kept."""
        point = self._points.complete
        return point is not None and point.is_last and point.execution == self._execution

    def stopped_at_point(self) -> bool:
        """Whether the client left its loop after a step that has a recovery point, which is no last one."""
        point = self._points.complete
        return (
            point is not None
            and not point.is_last
            and (point.execution, point.step) == (self._execution, self._num_steps)
        )

    def forget_before(self, number: int) -> None:
        """Discards points before this one, as the states have changed."""
        self._points.forget(number)

    def make_first(self, epoch: int) -> int:
        """Begins the point before the first step; returns its number."""
        return self._make(epoch, FIRST_POINT, 0)

    def make_last(self, epoch: int) -> int:
        """Begins the point after the last step; returns its number."""
        return self._make(epoch, LAST_POINT, self._num_steps)

    def make_next(self, epoch: int, step: int) -> bool:
        """Requests a point at this step or soon after, while steps run.

        Returns:
            False if the step would be the last one or later, or while the previous point is being made, which a new
            request would replace.
        """
        topology = self._nodes.topology
        # Batch t comes from worker t mod their number: an epoch must begin at a multiple.
        step = -(-step // topology.num_workers_per_wafer) * topology.num_workers_per_wafer
        now = self._clock.monotonic()
        give_up_seconds = GIVE_UP_INTERVALS * settings.RECOVERY_SECONDS.get()
        is_early = not self._points.is_over(self._next) and now - self._requested_at < give_up_seconds
        if step >= self._num_steps or is_early:
            return False
        self._order += 1
        self._next, self._requested_at = self._make(epoch, self._order, step), now
        keep = node_pb2.KeepRecoveryPoint(epoch=epoch, step=step, recovery_point=self._next)
        members = [*topology.state_keepers, *topology.workers]
        self._nodes.send(members, lambda _: node_pb2.AttachRequest(keep_recovery_point=keep))
        return True

    def has(self, number: int) -> bool:
        """Whether this point, or a later one, is complete, or was given up."""
        self.settle()
        return self._points.is_over(number)

    def settle(self) -> None:
        """Completes points that lack nothing; after a point share or a message of the client."""
        self._points.settle(self._execution, self._is_received)

    def input_state(self, worker: str, step: int, state: bytes) -> None:
        """Notes the state of a worker's loader after a step."""
        self._points.input_state(worker, self._execution, step, state)

    def _make(self, epoch: int, order: int, step: int) -> int:
        topology = self._nodes.topology
        number = (epoch << POINT_BITS) + order
        # An epoch that begins at the last point has no batches: the states of the loaders cannot be found out again.
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
