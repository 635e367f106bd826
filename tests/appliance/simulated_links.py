"""The links of a simulated plan: frames that refer to tensors or hold copies, and the roles that still read them."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from waferbox.links.elements import tensor_bytes, torch_dtype
from waferbox.links.frame import INLINE_BYTES
from wsc.v1 import plan_pb2


class Deadlock(AssertionError):
    """Raised when every role waits."""


class Hazard(AssertionError):
    """Raised when a role writes a buffer that another has yet to read."""


@dataclass(slots=True)
class Frame:
    """A group's tensors of one step, in the order of its members."""

    group: int
    step: int
    tensors: list[torch.Tensor]
    sent: list[torch.Tensor]  # what they were then

    @classmethod
    def of(cls, group: plan_pb2.Group, step: int, tensors: Sequence[torch.Tensor], *, as_bytes: bool) -> "Frame":
        inline = as_bytes or group.nbytes <= INLINE_BYTES
        kept = [tensor.clone() for tensor in tensors] if inline else list(tensors)
        return cls(group.id, step, kept, [tensor.clone() for tensor in kept])

    def check(self, reader: str, read: Sequence[torch.Tensor]) -> None:
        """Tensors of the frame are read: they must be as they were sent. The others may have gone on."""
        for tensor, sent in zip(self.tensors, self.sent, strict=True):
            if any(tensor is one for one in read) and not _same(tensor, sent):
                raise Hazard(f"{reader} reads group {self.group} of step {self.step}, which was written again")


def _same(tensor: torch.Tensor, sent: torch.Tensor) -> bool:
    # The first takes a tenth of the time, and no nan for another.
    return torch.equal(tensor, sent) or torch.allclose(tensor, sent, rtol=0, atol=0, equal_nan=True)


@dataclass(slots=True)
class Held:
    """A value of a role, with the frame that it was received in."""

    tensor: torch.Tensor
    frame: Frame | None = None


@dataclass(slots=True)
class Wires:
    """The frames on their way, in order, by (sender, receiver)."""

    queues: dict[tuple[str, str], deque[Frame]] = field(default_factory=lambda: defaultdict(deque))
    taken: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))  # weights, by (shard, wafer)
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # weights groups, by shard
    released: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # the last count of shards and SwarmX
    moves: int = 0  # the actions of all roles

    def send(self, sender: str, receiver: str, frame: Frame) -> None:
        self.moves += 1
        self.queues[sender, receiver].append(frame)

    def take(self, sender: str, receiver: str, group: int, step: int) -> Frame | None:
        queue = self.queues[sender, receiver]
        for index, frame in enumerate(queue):
            if (frame.group, frame.step) == (group, step):
                self.moves += 1
                # By index, since two different frames may be equal.
                del queue[index]
                return frame
        return None

    def left_over(self) -> list[str]:
        return [f"{a}->{b}: group {f.group} of step {f.step}" for (a, b), q in self.queues.items() for f in q]


def empty(type: plan_pb2.TensorType) -> torch.Tensor:
    """A place in a buffer: it has its size for good."""
    dtype, nbytes = torch_dtype(type.element_type), tensor_bytes(type)
    if nbytes == 0:
        return torch.empty(tuple(type.shape), dtype=dtype)
    return torch.frombuffer(bytearray(nbytes), dtype=dtype).reshape(tuple(type.shape))


def view(memory: bytearray, offset: int, type: plan_pb2.TensorType) -> torch.Tensor:
    dtype, nbytes = torch_dtype(type.element_type), tensor_bytes(type)
    count = nbytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(tuple(type.shape))


def arena_places(arena: plan_pb2.SendArena, groups: Mapping[int, plan_pb2.Group]) -> dict[int, dict[int, torch.Tensor]]:
    """A sender's arena: the tensors of each group by their values. Groups overlap where the plan has them overlap."""
    memory = bytearray(arena.nbytes)
    return {
        place.group: {m.value: view(memory, place.offset + m.offset, m.type) for m in groups[place.group].members}
        for place in arena.places
    }


def check_type(group: plan_pb2.Group, tensors: Sequence[torch.Tensor]) -> None:
    for member, tensor in zip(group.members, tensors, strict=True):
        assert tuple(member.type.shape) == tuple(tensor.shape), (group.id, member.value)
        assert torch_dtype(member.type.element_type) is tensor.dtype, (group.id, member.value)
        assert member.offset % 64 == 0 or group.reduction == plan_pb2.REDUCTION_GATHER
