"""Lays out the arena from which gradient groups are sent: a ring, in which the groups of a segment lie together.

A wafer writes a segment's gradients while those of the segment before may still be read, so the ring has room for the
two largest consecutive segments. If the ring can hold all groups of the step, each group has its own place, and no
group waits for another. Where memory is short, the ring has room for the largest segment alone.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Final

from waferbox.links.elements import aligned
from waferbox.runtime.arena import direct_values, is_in_arena
from wsc.v1 import plan_pb2

# Additional room, so that small segments run on while the updates of several earlier ones are still to be made.
SLACK_BYTES: Final = 16 << 20


@dataclass(slots=True)
class _Burst:
    """Groups that must lie in the arena at the same time, as one is written before another is sent.

    Attributes:
        groups: the groups, in the order in which they are sent.
        last_sent: position of the instruction that sends the last one.
        offset: its begin in the arena, in bytes.
        released: the release count that is awaited before it is written.
    """

    groups: list[plan_pb2.Group]
    last_sent: int
    offset: int = 0
    released: int = 0

    @property
    def nbytes(self) -> int:
        return sum(aligned(group.nbytes) for group in self.groups)

    def overlaps(self, other: "_Burst") -> bool:
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


def lay_out_arena(plan: plan_pb2.WaferPlan, *, is_small: bool = False) -> plan_pb2.SendArena:
    """Lays out the arena of a wafer's program.

    is_small: whether there is room for one segment alone, so that each waits until all earlier gradients were read.
    """
    bursts = _bursts(plan)
    sizes = [burst.nbytes for burst in bursts]
    # The first of a step follows the last of the step before.
    largest = max((before + size for before, size in zip([*sizes[-1:], *sizes], sizes, strict=False)), default=0)
    room = max(sizes, default=0) if is_small else min(sum(sizes), largest + SLACK_BYTES)
    arena = plan_pb2.SendArena(credited=room < sum(sizes))
    end = 0
    for burst in bursts:
        burst.offset = end if end + burst.nbytes <= room else 0
        end = burst.offset + burst.nbytes
        arena.nbytes = max(arena.nbytes, end)
    if arena.credited:
        _find_waits(bursts)
    index = 0
    for burst in bursts:
        offset = burst.offset
        for group in burst.groups:
            window = index - burst.released if arena.credited else 0
            arena.places.add(group=group.id, offset=offset, window=window)
            offset += aligned(group.nbytes)
            index += 1
    return arena


def _bursts(plan: plan_pb2.WaferPlan) -> list[_Burst]:
    """The bursts in order: a group joins those before it that are sent after its own first write."""
    groups = {group.id: group for group in plan.groups}
    direct = direct_values(plan)
    made: dict[int, int] = {}  # value -> position of the kernel that first writes it in the arena
    bursts: list[_Burst] = []
    for position, instruction in enumerate(plan.instructions):
        match instruction.WhichOneof("kind"):
            case "run":
                for value in instruction.run.outputs:
                    if value in direct:
                        made.setdefault(value, position)  # the parts of later micro-batches are added to the first
            case "send" if is_in_arena(group := groups[instruction.send.group]):
                begin = min([position, *(made[m.value] for m in group.members if m.value in made)])
                together = [group]
                while bursts and bursts[-1].last_sent > begin:
                    together = bursts.pop().groups + together
                bursts.append(_Burst(together, position))
    return bursts


def _find_waits(bursts: list[_Burst]) -> None:
    """Sets the count that each burst awaits: the release of the last earlier burst that it overlaps.

    The earlier burst is one of this step, or of the step before, whose counts are at most 0.
    """
    ends: list[int] = []
    for burst in bursts:
        ends.append((ends[-1] if ends else 0) + len(burst.groups))
    for number, burst in enumerate(bursts):
        # The latest comes first. It is near, as the ring has room for few bursts; the burst itself is the farthest.
        before = ((ends[i], bursts[i]) for i in range(number - 1, -1, -1))
        step_before = ((ends[i] - ends[-1], bursts[i]) for i in range(len(bursts) - 1, number - 1, -1))
        burst.released = next(count for count, other in chain(before, step_before) if other.overlaps(burst))
    # A burst awaits no smaller count than the burst before it, so that counts are awaited in ascending order. The first
    # pass gives what the last burst of a step has awaited, which is where the first one of the next step begins.
    reached = bursts[-1].released - ends[-1] if bursts else 0
    for _ in range(2):
        for burst in bursts:
            burst.released = reached = max(burst.released, reached)
        reached -= ends[-1] if ends else 0
