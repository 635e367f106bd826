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

# --- The states as they were after one step, while steps go on --------------------------------------------------------


class Snapshot:
    """All states as they were after one step. Thread-safe.

    At first it is the live states. A state is copied aside when somebody reads it, or just before it is written,
    whichever is first; who comes second helps the first, so no step waits for a reader.
    """

    def __init__(
        self,
        step: int,
        places: Mapping[str, StateExtent],
        live: StateMemory,
        aside: StateMemory,
        on_read: Callable[[Extent], None],
    ) -> None:
        """aside: memory as large as the live one. on_read(extent): a reader has touched the live states there."""
        self.step = step
        self.places = places
        self.aside = aside
        self._live = live
        self._on_read = on_read
        self._lock = threading.Lock()
        self._copied: dict[str, int] = {}  # bytes of a state, from its start

    def part(self, name: str, offset: int, nbytes: int) -> Slice:
        """Some bytes of a state, which stay as long as the snapshot does."""
        place = self.places[name]
        before = self._copied.get(name, 0)
        self._copy(name, offset + nbytes)
        if before < offset + nbytes:
            self._on_read((place.offset + before, offset + nbytes - before))
        return Slice(self.aside.memory, place.offset + offset, nbytes)

    def before_write(self, name: str, part: int = 0, count: int = 1) -> None:
        """Keep what a state is now, up to the end of this part of it; it may be written then."""
        if name in self.places:
            self._copy(name, -(-self.places[name].nbytes * (part + 1) // count))

    def _copy(self, name: str, nbytes: int) -> None:
        place = self.places[name]
        while self._copied.get(name, 0) < nbytes:
            with self._lock:
                done = self._copied.get(name, 0)
                length = min(CHUNK_BYTES, place.nbytes - done)
                if length:
                    self.aside.copy_from(self._live, place.offset + done, place.offset + done, length)
                    self._copied[name] = done + length


# --- The states that one shard keeps for one job: they survive executions, and go with the job ------------------------


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
            if name in self._written and not self._layout.places[name].holds(tensor_type)
        }
        kept = put_back
        if kept is None:
            kept = {name: place for name, place in self._layout.places.items() if name in self._written}
        fitting = fit(required, self._layout) if self._memory is not None else None
        if fitting is not None and _has_room(fitting.places, kept, wanted):
            self._layout = fitting
        else:
            self._move_to(lay_out(required, kept))
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

    def places(self) -> Mapping[str, StateExtent]:
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

    def begin_recovery_point(self, *, required: bool) -> PointShare:
        """Everything as it is now, which somebody is to write to a file. The one before has ended."""
        names = dict.fromkeys((*self._order, *self._layout.places))
        places = {name: self._layout.places[name] for name in names if name in self._written}
        self._recovery_point = PointShare(places, self.states, self.was_read, required=required)
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
            self.states.evict(extent)

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
    places: Mapping[str, StateExtent], kept: Mapping[str, StateExtent], wanted: Mapping[str, plan_pb2.TensorType]
) -> bool:
    """Whether states that a plan does not name have their places, too."""
    return all(name in wanted or (name in places and places[name].is_like(place)) for name, place in kept.items())


# ----------------------------------------------------------------------------------------------------------------------
# The snapshot that a shard keeps for the client between a checkpoint step and the end of the client's reading


class Snapshots:
    """At most one snapshot: the execution waits, at the next checkpoint step, until the client has done with it."""

    def __init__(self, store: StateStore, announce: Callable[[int], None]) -> None:
        """announce(step) tells the coordinator that the snapshot can be read."""
        self._store = store
        self._announce = announce
        self._changed = threading.Condition()
        self._held: Snapshot | None = None
        self._readers = 0  # of the snapshot that is held, or that was held last
        self._interrupted = False

    def take(self, step: int) -> None:
        """Keep the state; waits until the snapshot before is released and read. Stopped when interrupted."""
        with self._changed:
            self._changed.wait_for(lambda: (self._held is None and not self._readers) or self._interrupted)
            if self._interrupted:
                raise Stopped
            self._held = self._store.snapshot(step)
        self._announce(step)

    @contextmanager
    def reading(self, step: int) -> Iterator[Snapshot]:
        """The snapshot of a step, which stays while it is read. KeyError if there is none of this step."""
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
        """The client does not want this snapshot any more. Never blocks: a reading that is not over frees it."""
        with self._changed:
            if self._held is not None and self._held.step == step:
                self._evict()

    def interrupt(self) -> None:
        """Make take raise Stopped, until reset."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def reset(self) -> None:
        """Before another execution: drop what is left of the one before."""
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
