"""The groups that a SwarmX node reduces: the children's frames of a group, and the counts of released groups."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from waferbox.links.link import Message
from waferbox.links.shared_memory import SharedMemory, Slice
from waferbox.runtime.arena import ArenaCounts
from waferbox.runtime.schedule import part_bytes
from wsc.v1 import plan_pb2

# --- Reduction groups -------------------------------------------------------------------------------------------------


def joined_bytes(group: plan_pb2.Group, wafers_below: Sequence[int]) -> int:
    """Returns the bytes of a group after its reduction."""
    parts = sum(wafers_below) if group.reduction == plan_pb2.REDUCTION_GATHER else 1
    return part_bytes(group) * parts


def child_bytes(group: plan_pb2.Group, wafers: int) -> int:
    """Returns the bytes of the frame of a child with so many wafers."""
    return joined_bytes(group, [wafers])


class Collector:
    """The frames of one reduction group until all children's have arrived. Used by one thread.

    Each child sends its frames in order. A child may be steps ahead of another, in groups for the coordinator, which no
    node awaits.
    """

    def __init__(self, group: plan_pb2.Group, wafers_below: Sequence[int], memory: SharedMemory, offset: int) -> None:
        """
        Args:
            group: the group.
            wafers_below: the number of wafers below each child, in order.
            memory: the shared memory of the result.
            offset: the offset of the result in it.
        """
        self._result = Slice(memory, offset, joined_bytes(group, wafers_below))
        self._num_children = len(wafers_below)
        self._parts: list[deque[Message]] = [deque() for _ in wafers_below]  # by child
        self._received = [0] * self._num_children
        if self._num_children > 1:
            # A node with one child adds nothing, and needs no torch.
            from swarmx.reduction import Join

            self._join = Join(group, [child_bytes(group, wafers) for wafers in wafers_below], self._result)

    def add(self, child: int, message: Message) -> bool:
        """Takes a child's frame. Returns whether all others have sent theirs, so that the group can be joined."""
        self._parts[child].append(message)
        before = min(self._received)
        self._received[child] += 1
        return min(self._received) > before

    def join(self) -> Slice:
        """Reduces the first frames of all children, and drops them. Returns the result."""
        parts = [frames.popleft() for frames in self._parts]
        if self._num_children == 1:
            self._result.view[:] = parts[0].view
        else:
            self._join(parts)
        return self._result


# --- Released gradient groups -----------------------------------------------------------------------------------------

Source = TypeVar("Source")


class Releases(Generic[Source]):
    """The count of groups that all receivers have released. It does not decrease. Used by one thread."""

    def __init__(self, first: Mapping[Source, int]) -> None:
        """first: the receivers, with the first count of each."""
        self._counts = dict(first)
        self.count = min(first.values(), default=0)

    def add(self, source: Source, count: int) -> bool:
        """Sets the count of a receiver. Returns whether the count of all has increased."""
        self._counts[source] = max(self._counts[source], count)
        before, self.count = self.count, min(self._counts.values())
        return self.count > before


class ReleaseNotifier:
    """Sends each awaited count to the children, once. Used by one thread."""

    def __init__(self, counts: ArenaCounts, notify: Callable[[int], None]) -> None:
        self._counts = counts
        self._notify = notify
        self._notified = 0

    def reached(self, count: int) -> None:
        """Sends the awaited counts up to the number of released groups."""
        for awaited in self._counts.awaited_between(self._notified, count):
            self._notify(awaited)
        self._notified = max(self._notified, count)
