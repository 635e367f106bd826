"""One reduction group at a SwarmX node: the children's frames of a step are kept until all have come, and joined."""

from collections.abc import Sequence

from interconnect.links.link import Message
from interconnect.links.shared_memory import SharedMemory, Slice
from nodes.steps.schedule import part_bytes
from wsc.v1 import plan_pb2


def joined_bytes(group: plan_pb2.Group, wafers_below: Sequence[int]) -> int:
    """The bytes of the group when the parts of all children are joined."""
    parts = sum(wafers_below) if group.reduction == plan_pb2.REDUCTION_GATHER else 1
    return part_bytes(group) * parts


def child_bytes(group: plan_pb2.Group, wafers: int) -> int:
    """The bytes of the frame of a child with so many wafers."""
    return joined_bytes(group, [wafers])


class Collector:
    """A child may be steps ahead of another, in groups that nobody waits for: those for the coordinator."""

    def __init__(self, group: plan_pb2.Group, wafers_below: Sequence[int], memory: SharedMemory, offset: int) -> None:
        """The result is written into the shared memory at offset. wafers_below: of each child, in order."""
        self._result = Slice(memory, offset, joined_bytes(group, wafers_below))
        self._num_children = len(wafers_below)
        self._parts: dict[int, dict[int, Message]] = {}  # step -> child -> frame
        if self._num_children > 1:
            # A node with one child adds nothing, and needs no torch.
            from swarmx.reduction import Join

            self._join = Join(group, [child_bytes(group, wafers) for wafers in wafers_below], self._result)

    def add(self, child: int, message: Message) -> bool:
        """Take a child's frame. Returns whether it is the last of its step: the group can be joined."""
        parts = self._parts.setdefault(message.step, {})
        parts[child] = message
        return len(parts) == self._num_children

    def join(self, step: int) -> Slice:
        """The joined group of a step of which all frames are there; they are read no more."""
        parts = self._parts.pop(step)
        if self._num_children == 1:
            self._result.view[:] = parts[0].view
        else:
            self._join([parts[i] for i in range(self._num_children)])
        return self._result
