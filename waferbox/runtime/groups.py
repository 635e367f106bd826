"""Groups as tensors: of frames that were received, and of the buffers that a role sends from. Imports torch."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch

from waferbox.links.elements import aligned, tensor_bytes, torch_dtype
from waferbox.links.frame import INLINE_BYTES
from waferbox.links.link import Message
from waferbox.links.shared_memory import SharedMemory, Slice, view_as_tensor
from waferbox.runtime.schedule import part_bytes
from wsc.v1 import plan_pb2


@dataclass(frozen=True, slots=True)
class GroupTensor:
    """One tensor of a group."""

    value: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def members(group: plan_pb2.Group) -> list[GroupTensor]:
    """The group's members. ValueError where one does not lie in the group's buffer."""
    found = []
    for member in group.members:
        nbytes = tensor_bytes(member.type)
        if member.offset + nbytes > group.nbytes:
            raise ValueError(
                f"value {member.value} ends at byte {member.offset + nbytes} of group {group.id}, "
                f"which has {group.nbytes} bytes"
            )
        dtype = torch_dtype(member.type.element_type)
        found.append(GroupTensor(member.value, dtype, tuple(member.type.shape), member.offset, nbytes))
    return found


class ReceivedGroup:
    """The tensors of a group's frames, step after step.

    Mapped frames: views, made once for each place and kept, since a group comes again and again in the same few places.
    Small frames of bytes, and mapped ones that are to be kept: copied into a buffer of our own, whose views are made
    once. Large ones of bytes, and those in a file, which is mapped anew for each: views of the bytes. All are valid
    until the next frame of the group is asked for, as far as the sender does not write a mapped one again.
    """

    def __init__(self, group: plan_pb2.Group, *, keep: bool = False) -> None:
        self.members = members(group)
        self._id = group.id
        self._nbytes = group.nbytes
        self._keep = keep
        self._mapped: dict[tuple[SharedMemory, int], list[torch.Tensor]] = {}
        self._is_small = 0 < group.nbytes <= INLINE_BYTES
        self._own = bytearray(0)
        self._own_views: list[torch.Tensor] = []

    def tensors(self, message: Message) -> list[torch.Tensor]:
        """The members, in order."""
        if message.nbytes != self._nbytes:
            raise ValueError(
                f"a frame of group {self._id} from {message.link.name} has {message.nbytes} bytes, not {self._nbytes}"
            )
        memory = message.memory
        if memory is not None and memory.whole and not self._keep:
            place = (memory, message.offset)
            views = self._mapped.get(place)
            if views is None:
                views = [message.tensor(member.dtype, member.shape, member.offset) for member in self.members]
                self._mapped[place] = views
            return views
        if self._is_small or (memory is not None and self._keep):
            if not self._own_views:
                self._own = bytearray(self._nbytes)
                self._own_views = [_view(self._own, member) for member in self.members]
            self._own[:] = message.view
            return self._own_views
        view = message.view
        return [view_as_tensor(view, member.dtype, member.shape, member.offset) for member in self.members]


class SendBuffers:
    """The buffers that a role sends its groups from, written again in each step.

    Most have a place for good in one memory of their own; MemoryX's weights lie among its states (homes); gradient
    groups take turns in the arena. A value that a kernel makes is written by it into the first group that sends it, and
    copied into the others just before they are sent.
    """

    def __init__(
        self,
        groups: Iterable[plan_pb2.Group],
        produced: Container[int],
        *,
        homes: Mapping[int, Slice] | None = None,
        settled: Mapping[int, torch.Tensor] | None = None,
        arena: plan_pb2.SendArena | None = None,
        direct: Container[int] = (),
    ) -> None:
        """produced: values that kernels make; direct: those that may be written straight into the arena.

        settled: values that lie somewhere for good (states).
        """
        groups = list({group.id: group for group in groups}.values())  # one may be sent twice in a step
        slices = dict(homes or {})
        in_arena = {place.group: place.offset for place in arena.places} if arena is not None else {}
        end = arena.nbytes if arena is not None else 0
        bases = {}
        for group in groups:
            if group.id in in_arena:
                bases[group.id] = (in_arena[group.id], part_bytes(group))
            elif group.id not in slices:
                bases[group.id] = (end, part_bytes(group))
                end = aligned(end + group.nbytes)
        self._memory = SharedMemory.create(max(end, 1))
        self._slices = slices | {group: Slice(self._memory, *extent) for group, extent in bases.items()}
        self._places: dict[int, torch.Tensor] = {}
        self._home_groups: dict[int, int] = {}
        self._copies: dict[int, list[tuple[int, torch.Tensor]]] = {}
        settled = settled or {}
        for group in groups:
            home = self._slices[group.id]
            makers = direct if group.id in in_arena else produced
            for member in members(group):
                tensor = home.memory.tensor(member.dtype, member.shape, home.offset + member.offset)
                owner = settled.get(member.value)
                if owner is not None and owner.data_ptr() == tensor.data_ptr():
                    continue
                if owner is None and member.value in makers and member.value not in self._places:
                    self._places[member.value] = tensor
                    self._home_groups[member.value] = group.id
                else:
                    self._copies.setdefault(group.id, []).append((member.value, tensor))

    @property
    def nothing(self) -> Slice:
        """No bytes."""
        return Slice(self._memory, 0, 0)

    @property
    def nbytes(self) -> int:
        """Of the memory that is this object's own."""
        return self._memory.nbytes

    def slice(self, group: int) -> Slice:
        """What is sent."""
        return self._slices[group]

    def place(self, value: int) -> torch.Tensor | None:
        """Where the kernel that makes the value should write it, if anywhere."""
        return self._places.get(value)

    def home_group(self, value: int) -> int | None:
        """The group that `place` lies in."""
        return self._home_groups.get(value)

    def copies(self, group: int) -> list[tuple[int, torch.Tensor]]:
        """Values to be copied, and where to, before the group is sent."""
        return self._copies.get(group, [])

    def close(self) -> None:
        """Nothing may use the buffers any more."""
        self._places.clear()
        self._copies.clear()
        self._memory.close()


def _view(buffer: bytearray, member: GroupTensor) -> torch.Tensor:
    if member.nbytes == 0:
        return torch.empty(member.shape, dtype=member.dtype)
    count = member.nbytes // member.dtype.itemsize
    return torch.frombuffer(buffer, dtype=member.dtype, count=count, offset=member.offset).reshape(member.shape)
