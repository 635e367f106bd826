"""The states that one process keeps for one job, and snapshots of them for the client."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from waferbox.links.elements import torch_dtype
from waferbox.links.hub import Stopped
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.states.layout import Layout, StateExtent, StateRequirements, fit, lay_out
from waferbox.states.pager import Extent, Pager
from waferbox.states.point_share import PointShare
from waferbox.states.state_memory import CHUNK_BYTES, StateMemory, StateSettings
from wsc.v1 import plan_pb2

# --- Snapshots --------------------------------------------------------------------------------------------------------


class Snapshot:
    """All states as they were after one step, while further steps run. Thread-safe.

    A state is copied aside when the client reads it, or just before a step writes it, whichever is first. A step that
    meets a copy in progress makes the rest of it, and does not wait for the reader.
    """

    def __init__(
        self,
        step: int,
        extents: Mapping[str, StateExtent],
        live: StateMemory,
        aside: StateMemory,
        on_read: Callable[[Extent], None],
    ) -> None:
        """aside: memory as large as the live one. on_read: called with an extent of the live states that was read."""
        self.step = step
        self.extents = extents
        self.aside = aside
        self._live = live
        self._on_read = on_read
        self._lock = threading.Lock()
        self._copied: dict[str, int] = {}  # bytes of a state, from its start, that are aside

    def part(self, name: str, offset: int, nbytes: int) -> Slice:
        """Returns some bytes of a state, which are valid as long as the snapshot is."""
        extent = self.extents[name]
        before = self._copied.get(name, 0)
        self._copy(name, offset + nbytes)
        if before < offset + nbytes:
            self._on_read((extent.offset + before, offset + nbytes - before))
        return Slice(self.aside.memory, extent.offset + offset, nbytes)

    def before_write(self, name: str, part: int = 0, count: int = 1) -> None:
        """Copies a state aside, up to the end of a part, so that the caller can write it."""
        if name in self.extents:
            self._copy(name, -(-self.extents[name].nbytes * (part + 1) // count))

    def _copy(self, name: str, nbytes: int) -> None:
        extent = self.extents[name]
        while self._copied.get(name, 0) < nbytes:
            with self._lock:
                done = self._copied.get(name, 0)
                length = min(CHUNK_BYTES, extent.nbytes - done)
                if length:
                    self.aside.copy_from(self._live, extent.offset + done, extent.offset + done, length)
                    self._copied[name] = done + length


# --- The states -------------------------------------------------------------------------------------------------------


class StateStore:
    """The states that a state keeper has for one job, in one memory. They last as long as the job.

    Not locked: the job decides whether the execution or the client uses the store.
    """

    def __init__(self, settings: StateSettings | None = None) -> None:
        self.settings = settings or StateSettings()
        self.pager: Pager | None = None  # the pager of the running execution, if states are paged
        self._memory: StateMemory | None = None
        self._layout = Layout(extents={}, group_bases={}, nbytes=0)
        self._written: set[str] = set()
        self._spare: StateMemory | None = None  # the memory of a released snapshot, for the next one
        self._snapshot: Snapshot | None = None
        self._recovery_point: PointShare | None = None
        self._order: Sequence[str] = ()  # the required states; those that a step writes first come first

    def load(self, required: StateRequirements, put_back: Mapping[str, StateExtent] | None = None) -> list[str]:
        """Lays out the required states. Returns the names of those without a value.

        Args:
            required: the states that the next execution uses.
            put_back: states that are about to be written, with the types that they have unless the requirements have
                others; all values that the store has are dropped. None: the store keeps its values.
        """
        wanted = {slot.name: slot.type for slot in required.slots}
        self._order = list(dict.fromkeys((*required.write_order, *wanted)))
        if put_back is not None:
            self._written.clear()
        self._written -= {
            name
            for name, tensor_type in wanted.items()
            if name in self._written and not self._layout.extents[name].holds(tensor_type)
        }
        kept = put_back
        if kept is None:
            kept = {name: extent for name, extent in self._layout.extents.items() if name in self._written}
        fitting = fit(required, self._layout) if self._memory is not None else None
        if fitting is not None and _has_room(fitting.extents, kept, wanted):
            self._layout = fitting
        else:
            self._move_to(lay_out(required, kept))
        return [name for name in wanted if name not in self._written]

    @property
    def states(self) -> StateMemory:
        """The memory of the states."""
        assert self._memory is not None, "a plan has been loaded"
        return self._memory

    @property
    def memory(self) -> SharedMemory:
        return self.states.memory

    def tensor(self, name: str) -> torch.Tensor:
        """Returns the live tensor of a state. A caller that writes it between executions calls `before_write` first."""
        extent = self._layout.extents[name]
        return self.memory.tensor(torch_dtype(extent.element_type), extent.shape, extent.offset)

    def group_base(self, group: int) -> int | None:
        """Returns the offset of a weights group in the shared memory; None: the group is not sent in place."""
        return self._layout.group_bases.get(group)

    def extents(self) -> Mapping[str, StateExtent]:
        """Returns the extents of all states in the layout, with and without a value."""
        return self._layout.extents

    def is_written(self, name: str) -> bool:
        return name in self._written

    def mark_written(self, names: Iterable[str]) -> None:
        self._written.update(names)

    @property
    def copies_on_write(self) -> bool:
        """Whether `before_write` has an effect."""
        return self._snapshot is not None or self._recovery_point is not None

    def before_write(self, names: Collection[str], part: tuple[int, int] = (0, 1)) -> None:
        """Copies the values of states for the snapshot and the recovery point, as far as these need them.

        Args:
            names: the states that are about to be written.
            part: number and count of the part that is about to be written; those before have been written.
        """
        snapshot = self._snapshot
        if snapshot is not None:
            for name in names:
                snapshot.before_write(name, *part)
        point = self._recovery_point
        if point is not None:
            for name in names:
                point.before_write(name, *part)
            # A point of unchanged states stays, as its file can serve a later point.
            if point.ended and not point.unchanged:
                self._recovery_point = None

    def reserve_snapshot(self) -> None:
        """Takes the disk space of a snapshot, where states are in files."""
        if self.settings.folder is not None:
            self._spare = self._take_spare()

    def snapshot(self, step: int) -> Snapshot:
        """Returns a snapshot of the states as they are now. The snapshot before has been released."""
        assert self._snapshot is None
        extents = {name: extent for name, extent in self._layout.extents.items() if name in self._written}
        self._snapshot = Snapshot(step, extents, self.states, self._take_spare(), self.was_read)
        return self._snapshot

    def begin_recovery_point(self, *, required: bool) -> PointShare:
        """Returns a point share of the states as they are now, to be written to a file. The share before has ended."""
        names = dict.fromkeys((*self._order, *self._layout.extents))
        extents = {name: self._layout.extents[name] for name in names if name in self._written}
        self._recovery_point = PointShare(extents, self.states, self.was_read, required=required)
        return self._recovery_point

    def release(self, snapshot: Snapshot) -> None:
        """Keeps the memory of the snapshot for the next one."""
        assert snapshot is self._snapshot
        self._snapshot, self._spare = None, snapshot.aside

    def was_read(self, extent: Extent) -> None:
        """Evicts an extent of the live states after the client has read it, unless steps need it."""
        pager = self.pager
        if pager is not None:
            pager.touched(extent)
        else:
            self.states.evict(extent)

    def close(self) -> None:
        """Drops all states. Nothing uses the shared memory any more."""
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
        for name in self._written & layout.extents.keys():
            extent = self._layout.extents[name]
            memory.copy_from(self.states, extent.offset, layout.extents[name].offset, extent.nbytes)
            self.states.discard((extent.offset, extent.nbytes))
        if self._memory is not None:
            self._memory.close()
        self._memory, self._layout = memory, layout


def _has_room(
    extents: Mapping[str, StateExtent], kept: Mapping[str, StateExtent], wanted: Mapping[str, plan_pb2.TensorType]
) -> bool:
    """Whether a layout also has the states that are kept and not required."""
    return all(name in wanted or (name in extents and extents[name].is_like(extent)) for name, extent in kept.items())


# --- The snapshot for the client --------------------------------------------------------------------------------------


class Snapshots:
    """The snapshot that the client reads after a checkpoint step. Thread-safe.

    There is one at a time: at the next checkpoint step the execution waits until the client has released it.
    """

    def __init__(self, store: StateStore, announce: Callable[[int], None]) -> None:
        """announce: reports to the coordinator that the snapshot of a step can be read."""
        self._store = store
        self._announce = announce
        self._changed = threading.Condition()
        self._held: Snapshot | None = None
        self._readers = 0  # the readers of the latest snapshot
        self._interrupted = False

    def take(self, step: int) -> None:
        """Takes a snapshot, once the one before is released and no longer read. Raises Stopped: interrupted."""
        with self._changed:
            self._changed.wait_for(lambda: (self._held is None and not self._readers) or self._interrupted)
            if self._interrupted:
                raise Stopped
            self._held = self._store.snapshot(step)
        self._announce(step)

    @contextmanager
    def reading(self, step: int) -> Iterator[Snapshot]:
        """Gives the snapshot of a step to a reader. Raises KeyError: there is none."""
        with self._changed:
            if self._held is None or self._held.step != step:
                raise KeyError(step)
            snapshot = self._held
            self._readers += 1
        try:
            yield snapshot
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers and self._held is not snapshot:
                    self._store.release(snapshot)
                self._changed.notify_all()

    def release(self, step: int) -> None:
        """Releases the snapshot of a step, at once or at the end of its last reading. Does not wait."""
        with self._changed:
            if self._held is not None and self._held.step == step:
                self._evict()

    def interrupt(self) -> None:
        """Makes `take` raise Stopped, until `reset`."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Drops the snapshot of the execution before; called before another begins."""
        with self._changed:
            self._interrupted = False
            if self._held is not None:
                self._evict()

    def _evict(self) -> None:
        assert self._held is not None
        snapshot, self._held = self._held, None
        if not self._readers:
            self._store.release(snapshot)
        self._changed.notify_all()
