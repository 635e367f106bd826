"""The states that one shard keeps for one job: they survive executions, and go with the job."""

from collections.abc import Iterable, Mapping

import torch

from interconnect.links.elements import torch_dtype
from interconnect.links.shared_memory import SharedMemory
from memoryx.files.accesses import Extent
from memoryx.files.pager import Pager
from memoryx.files.state_memory import StateMemory, StateSettings
from memoryx.layout import Layout, Place, fit, lay_out
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

    def load(self, plan: plan_pb2.MemoryXPlan) -> list[str]:
        """Lay the states out for a plan. Returns the names of those that nobody has written yet."""
        wanted = {slot.name: slot.type for slot in plan.states}
        self._written -= {
            name
            for name, tensor_type in wanted.items()
            if name in self._written and not self._layout.places[name].holds(tensor_type)
        }
        fitting = fit(plan, self._layout) if self._memory is not None else None
        if fitting is not None:
            self._layout = fitting
        else:
            kept = {name: place for name, place in self._layout.places.items() if name in self._written}
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
    def has_snapshot(self) -> bool:
        """Whether before_write has an effect."""
        return self._snapshot is not None

    def before_write(self, names: Iterable[str], part: tuple[int, int] = (0, 1)) -> None:
        """Keep the values of states for the snapshot, if there is one.

        part: number and count, of writing in parts; those before have been written.
        """
        snapshot = self._snapshot
        if snapshot is not None:
            for name in names:
                snapshot.before_write(name, *part)

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
        memory = StateMemory(layout.nbytes, self.settings, "weights and optimizer state")
        for name in self._written & layout.places.keys():
            place = self._layout.places[name]
            memory.copy_from(self.states, place.offset, layout.places[name].offset, place.nbytes)
            self.states.discard((place.offset, place.nbytes))
        if self._memory is not None:
            self._memory.close()
        self._memory, self._layout = memory, layout
