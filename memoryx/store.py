"""The states that one shard keeps for one job: they survive executions, and go with the job."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from interconnect.links.elements import torch_dtype
from interconnect.links.shared_memory import SharedMemory
from memoryx.files.accesses import Extent
from memoryx.files.pager import Pager
from memoryx.files.place import Place
from memoryx.files.state_memory import StateMemory, StateSettings
from memoryx.layout import Layout, fit, lay_out, states_in_order
from memoryx.recovery.recovery_point import RecoveryPoint
from memoryx.snapshot import Snapshot
from wsc.v1 import plan_pb2


class StateStore:
    """Named tensors in one memory. Not locked: the job says when the execution uses it and when the client."""

    def __init__(self, settings: StateSettings | None = None) -> None:
        self.settings = settings or StateSettings()
        self.pager: Pager | None = None  # of the execution that runs, if the states need one
        self._memory: StateMemory | None = None
        self._layout = Layout(places={}, group_bases={}, nbytes=0)
        self._written: set[str] = set()
        self._spare: StateMemory | None = None  # of a snapshot that was released
        self._snapshot: Snapshot | None = None
        self._recovery_point: RecoveryPoint | None = None
        self._order: Sequence[str] = ()  # of the plan's states: those that a step writes first come first

    def load(self, plan: plan_pb2.MemoryXPlan, put_back: Mapping[str, Place] | None = None) -> list[str]:
        """Lay the states out for a plan. Returns the names of those that nobody has written yet.

        put_back: states that will be written, of these types if the plan does not say otherwise; what there was is
        nothing worth then.
        """
        wanted = {slot.name: slot.type for slot in plan.states}
        self._order = states_in_order(plan)
        if put_back is not None:
            self._written.clear()
        self._written -= {
            name
            for name, tensor_type in wanted.items()
            if name in self._written and not self._layout.places[name].holds(tensor_type)
        }
        kept = put_back
        if kept is None:
            kept = {name: place for name, place in self._layout.places.items() if name in self._written}
        fitting = fit(plan, self._layout) if self._memory is not None else None
        if fitting is not None and _has_room(fitting.places, kept, wanted):
            self._layout = fitting
        else:
            self._move_to(lay_out(plan, kept))
        return [name for name in wanted if name not in self._written]

    @property
    def states(self) -> StateMemory:
        """Where all of them lie."""
        assert self._memory is not None, "a plan has been loaded"
        return self._memory

    @property
    def memory(self) -> SharedMemory:
        return self.states.memory

    def tensor(self, name: str) -> torch.Tensor:
        """The live tensor of a state. Who writes it between executions calls before_write first."""
        place = self._layout.places[name]
        return self.memory.tensor(torch_dtype(place.element_type), place.shape, place.offset)

    def group_base(self, group: int) -> int | None:
        """Where a weights group with states in it begins in the shared memory."""
        return self._layout.group_bases.get(group)

    def places(self) -> Mapping[str, Place]:
        """Where each state lies that the store has room for."""
        return self._layout.places

    def is_written(self, name: str) -> bool:
        return name in self._written

    def mark_written(self, names: Iterable[str]) -> None:
        self._written.update(names)

    @property
    def copies_on_write(self) -> bool:
        """Whether before_write has an effect."""
        return self._snapshot is not None or self._recovery_point is not None

    def before_write(self, names: Collection[str], part: tuple[int, int] = (0, 1)) -> None:
        """Keep the values of states for the snapshot and for the recovery point, if there is one.

        part: number and count, of writing in parts; those before have been written.
        """
        snapshot = self._snapshot
        if snapshot is not None:
            for name in names:
                snapshot.before_write(name, *part)
        point = self._recovery_point
        if point is not None:
            for name in names:
                point.before_write(name, *part)
            if point.ended and not point.unchanged:  # a kernel may change no state, and then the point holds on
                self._recovery_point = None

    def reserve_snapshot(self) -> None:
        """Make sure that there is room for a snapshot on the disk, if it goes there."""
        if self.settings.folder is not None:
            self._spare = self._take_spare()

    def snapshot(self, step: int) -> Snapshot:
        """Everything as it is now. The one before has been released."""
        assert self._snapshot is None
        places = {name: place for name, place in self._layout.places.items() if name in self._written}
        self._snapshot = Snapshot(step, places, self.states, self._take_spare(), self.was_read)
        return self._snapshot

    def begin_recovery_point(self, *, required: bool) -> RecoveryPoint:
        """Everything as it is now, which somebody is to write to a file. The one before has ended."""
        names = dict.fromkeys((*self._order, *self._layout.places))
        places = {name: self._layout.places[name] for name in names if name in self._written}
        self._recovery_point = RecoveryPoint(places, self.states, self.was_read, required=required)
        return self._recovery_point

    def release(self, snapshot: Snapshot) -> None:
        """The snapshot's memory may serve the next one."""
        assert snapshot is self._snapshot
        self._snapshot, self._spare = None, snapshot.aside

    def was_read(self, extent: Extent) -> None:
        """The client has been shown the live states there: they need not stay in memory for that."""
        pager = self.pager
        if pager is not None:
            pager.touched(extent)
        else:
            self.states.let_go(extent)

    def close(self) -> None:
        """Drop everything. Nothing may use the shared memory any more."""
        for memory in (self._memory, self._spare):
            if memory is not None:
                memory.close()
        self._memory = self._spare = None
        self._written.clear()

    def _take_spare(self) -> StateMemory:
        spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes >= self.states.nbytes:
            return spare
        if spare is not None:
            spare.close()
        return StateMemory(self.states.nbytes, self.settings, "a snapshot of weights and optimizer state")

    def _move_to(self, layout: Layout) -> None:
        if self._recovery_point is not None:
            self._recovery_point.leave_live()
        memory = StateMemory(layout.nbytes, self.settings, "weights and optimizer state")
        for name in self._written & layout.places.keys():
            place = self._layout.places[name]
            memory.copy_from(self.states, place.offset, layout.places[name].offset, place.nbytes)
            self.states.discard((place.offset, place.nbytes))
        if self._memory is not None:
            self._memory.close()
        self._memory, self._layout = memory, layout


def _has_room(
    places: Mapping[str, Place], kept: Mapping[str, Place], wanted: Mapping[str, plan_pb2.TensorType]
) -> bool:
    """Whether states that a plan does not name have their places, too."""
    return all(name in wanted or (name in places and places[name].is_like(place)) for name, place in kept.items())
