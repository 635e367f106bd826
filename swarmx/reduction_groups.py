"""The groups that a SwarmX node reduces: the children's frames of a group, and the counts of released groups."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The bytes of a result that have been joined: those from begin to end, of a group in a step."""

    result: Slice
    step: int
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the result is complete."""
        return self.end == self.result.nbytes


class Collector:
    """The frames of one reduction group, or chunks of them, until all children's have arrived. Used by one thread.

    Each child sends its frames in order. A child may be steps ahead of another, in groups for the coordinator, which no
    node awaits.
    """

    def __init__(
        self,
        group: plan_pb2.Group,
        wafers_below: Sequence[int],
        memory: SharedMemory,
        offset: int,
        first_wafer: int = 0,
    ) -> None:
        """
        Args:
            group: the group.
            wafers_below: the number of wafers below each child, in order.
            memory: the shared memory of the result.
            offset: the offset of the result in it.
            first_wafer: the wafer with which the children begin, where the result has to begin with wafer 0.
        """
        self._result = Slice(memory, offset, joined_bytes(group, wafers_below))
        self._num_children = len(wafers_below)
        self._parts: list[deque[Message]] = [deque() for _ in wafers_below]  # by child
        self._joined_bytes = 0  # of the result that is being made
        if self._num_children > 1:
            # A node with one child adds nothing, and needs no torch.
            from swarmx.reduction import Join

            self._join = Join(group, self._result, first_wafer)

    def add(self, child: int, message: Message) -> None:
        """Takes a child's frame, or the next chunk of one."""
        self._parts[child].append(message)

    def may_join(self) -> bool:
        """Whether all children have sent what is to be joined next."""
        return all(self._parts)

    def join(self) -> Joined:
        """Reduces what all children have sent of their first frames, and drops it."""
        firsts = [messages[0] for messages in self._parts]
        begin = self._joined_bytes
        if self._num_children == 1:
            end = firsts[0].end
            self._result.view[begin:end] = firsts[0].view
        elif self._join.takes_chunks:
            end = min(message.end for message in firsts)
            self._join.add(firsts, begin, end)
        else:
            end = self._result.nbytes
            self._join.put_together(firsts)
        joined = Joined(result=self._result, step=firsts[0].step, begin=begin, end=end)
        for messages, first in zip(self._parts, firsts, strict=True):
            if joined.is_last or first.end == end:
                messages.popleft()
        self._joined_bytes = 0 if joined.is_last else end
        return joined


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
