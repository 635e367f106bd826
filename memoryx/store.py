"""The states that one shard keeps for one job: they survive executions, and go with the job."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from interconnect.links.elements import torch_dtype
from interconnect.links.shared_memory import SharedMemory
from memoryx.layout import Layout, Place, fit, lay_out
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All states as they were after one step."""

    step: int
    memory: SharedMemory
    places: Mapping[str, Place]


class StateStore:
    """Named tensors in one shared memory. Not locked: the job says when the execution uses it and when the client."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self._layout = Layout(places={}, group_bases={}, nbytes=0)
        self._written: set[str] = set()
        self._spare: SharedMemory | None = None  # of a snapshot that was released

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
    def memory(self) -> SharedMemory:
        assert self._memory is not None, "a plan has been loaded"
        return self._memory

    def tensor(self, name: str) -> torch.Tensor:
        """The live tensor of a state."""
        return _tensor(self.memory, self._layout.places[name])

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

    def snapshot(self, step: int) -> Snapshot:
        """A copy of everything as it is now."""
        nbytes = self._layout.nbytes
        copy, self._spare = self._spare, None
        if copy is None or copy.nbytes < nbytes:
            if copy is not None:
                copy.close()
            copy = SharedMemory.create(nbytes)
        copy.tensor(torch.uint8, (nbytes,), 0).copy_(self.memory.tensor(torch.uint8, (nbytes,), 0))
        places = {name: place for name, place in self._layout.places.items() if name in self._written}
        return Snapshot(step=step, memory=copy, places=places)

    def release(self, snapshot: Snapshot) -> None:
        """The snapshot's memory may serve the next one."""
        if self._spare is not None:
            self._spare.close()
        self._spare = snapshot.memory

    def close(self) -> None:
        """Drop everything. Nothing may use the shared memory any more."""
        for memory in (self._memory, self._spare):
            if memory is not None:
                memory.close()
        self._memory = self._spare = None
        self._written.clear()

    def _move_to(self, layout: Layout) -> None:
        memory = SharedMemory.create(layout.nbytes)
        for name in self._written & layout.places.keys():
            _tensor(memory, layout.places[name]).copy_(self.tensor(name))
        if self._memory is not None:
            self._memory.close()
        self._memory, self._layout = memory, layout


def _tensor(memory: SharedMemory, place: Place) -> torch.Tensor:
    return memory.tensor(torch_dtype(place.element_type), place.shape, place.offset)
