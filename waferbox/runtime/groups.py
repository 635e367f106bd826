"""Groups as tensors: the tensors of received frames, and the buffers that a role sends from. Imports torch."""

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
    """Returns the group's members. Raises ValueError: a member exceeds the group's buffer."""
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
    """The tensors of a group's frames, step after step. Used by one thread.

    Frames in shared memory give views, made once for each place, since a group arrives in the same few places. Small
    frames of bytes, and mapped frames with `keep`, are copied into a buffer of this object, whose views are made once.
    Where members are written, all frames are. Large frames of bytes, and frames in a file, which is mapped anew for
    each, give views of the bytes. Tensors are valid until the next call, unless the sender writes a mapped frame again.
    """

    def __init__(self, group: plan_pb2.Group, *, keep: bool = False, is_written: bool = False) -> None:
        self.members = members(group)
        self._id = group.id
        self._nbytes = group.nbytes
        self._keep = keep or is_written
        self._is_written = is_written
        self._mapped: dict[tuple[SharedMemory, int], list[torch.Tensor]] = {}
        self._is_small = 0 < group.nbytes <= INLINE_BYTES
        self._own = bytearray(0)
        self._own_views: list[torch.Tensor] = []

    def tensors(self, message: Message) -> list[torch.Tensor]:
        """Returns the members, in order. Raises ValueError: the frame has another size than the group."""
        if message.nbytes != self._nbytes:
            raise ValueError(
                f"a frame of group {self._id} from {message.link.name} has {message.nbytes} bytes, not {self._nbytes}"
            )
        memory = message.memory
        if memory is not None and memory.whole and not self._keep:
            location = (memory, message.offset)
            views = self._mapped.get(location)
            if views is None:
                views = [message.tensor(member.dtype, member.shape, member.offset) for member in self.members]
                self._mapped[location] = views
            return views
        if self._is_small or self._is_written or (memory is not None and self._keep):
            if not self._own_views:
                self._own = bytearray(self._nbytes)
                self._own_views = [_view(self._own, member) for member in self.members]
            self._own[:] = message.view
            return self._own_views
        view = message.view
        return [view_as_tensor(view, member.dtype, member.shape, member.offset) for member in self.members]


class SendBuffers:
    """The buffers that a role sends its groups from, written again in each step.

    Most groups have an extent of their own in one memory; MemoryX's weights are among its states (homes); gradient
    groups share the arena. A kernel writes its result into the first group that sends it; the result is copied into
    other groups just before they are sent.
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
        """
        Args:
            groups: the groups that are sent; a group may occur twice.
            produced: values that kernels make.
            homes: extents of groups that are not in this object's memory.
            settled: values with a tensor of their own, such as states.
            arena: the extents of groups that share the arena; None: no arena.
            direct: values that kernels may write to the arena.
        """
        groups = list({group.id: group for group in groups}.values())
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
        self._destinations: dict[int, torch.Tensor] = {}
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
                if owner is None and member.value in makers and member.value not in self._destinations:
                    self._destinations[member.value] = tensor
                    self._home_groups[member.value] = group.id
                else:
                    self._copies.setdefault(group.id, []).append((member.value, tensor))

    @property
    def nothing(self) -> Slice:
        """A payload without bytes."""
        return Slice(self._memory, 0, 0)

    @property
    def nbytes(self) -> int:
        """The bytes of this object's own memory."""
        return self._memory.nbytes

    def slice(self, group: int) -> Slice:
        """Returns the payload of a group."""
        return self._slices[group]

    def destination(self, value: int) -> torch.Tensor | None:
        """Returns the tensor that the maker of a value writes; None: it has none."""
        return self._destinations.get(value)

    def home_group(self, value: int) -> int | None:
        """Returns the group of `destination`."""
        return self._home_groups.get(value)

    def copies(self, group: int) -> list[tuple[int, torch.Tensor]]:
        """Returns the values that are copied into a group before it is sent, each with its tensor there."""
        return self._copies.get(group, [])

    def close(self) -> None:
        """Frees the buffers, which nothing uses any more."""
        self._destinations.clear()
        self._copies.clear()
        self._memory.close()


def _view(buffer: bytearray, member: GroupTensor) -> torch.Tensor:
    if member.nbytes == 0:
        return torch.empty(member.shape, dtype=member.dtype)
    count = member.nbytes // member.dtype.itemsize
    return torch.frombuffer(buffer, dtype=member.dtype, count=count, offset=member.offset).reshape(member.shape)
