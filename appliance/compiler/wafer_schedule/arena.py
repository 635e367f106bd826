"""Where gradient groups lie in the arena that they are sent from: a ring, in which a segment's groups lie together.

A wafer writes a segment's gradients while those of the segment before are still read: room for both, for the largest
two that follow one another. A ring that would hold all groups of the step is no ring: each has its own place.
"""

from dataclasses import dataclass
from typing import Final

from waferbox.links.elements import aligned
from waferbox.runtime.arena import direct_values, is_in_arena
from wsc.v1 import plan_pb2

# Beyond the largest two: small segments go on while the updates of several are still to be made.
SLACK_BYTES: Final = 16 << 20


@dataclass(slots=True)
class _Burst:
    """Groups of which one is written before another is sent."""

    groups: list[plan_pb2.Group]
    last_sent: int  # position of the instruction
    offset: int = 0
    released: int = 0  # the count that is awaited before it is written

    @property
    def nbytes(self) -> int:
        return sum(aligned(group.nbytes) for group in self.groups)

    def overlaps(self, other: "_Burst") -> bool:
        return self.offset < other.offset + other.nbytes and other.offset < self.offset + self.nbytes


def lay_out_arena(plan: plan_pb2.WaferPlan) -> plan_pb2.SendArena:
    """The arena of a wafer's program."""
    bursts = _bursts(plan)
    sizes = [burst.nbytes for burst in bursts]
    # The first of a step follows the last of the step before.
    largest = max((before + size for before, size in zip([*sizes[-1:], *sizes], sizes, strict=False)), default=0)
    room = min(sum(sizes), largest + SLACK_BYTES)
    arena = plan_pb2.SendArena(credited=room < sum(sizes))
    end = 0
    for burst in bursts:
        burst.offset = end if end + burst.nbytes <= room else 0
        end = burst.offset + burst.nbytes
        arena.nbytes = max(arena.nbytes, end)
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
    groups = {group.id: group for group in plan.groups}
    direct = direct_values(plan)
    made: dict[int, int] = {}  # value -> position of the kernel that first writes it in the arena
    bursts: list[_Burst] = []
    for position, instruction in enumerate(plan.instructions):
        match instruction.WhichOneof("kind"):
            case "run":
                for value in instruction.run.outputs:
                    if value in direct:
                        made.setdefault(value, position)  # the first micro-batch's is what others are joined to
            case "send" if is_in_arena(group := groups[instruction.send.group]):
                begin = min([position, *(made[m.value] for m in group.members if m.value in made)])
                together = [group]
                while bursts and bursts[-1].last_sent > begin:
                    together = bursts.pop().groups + together
                bursts.append(_Burst(together, position))
    return bursts


def _find_waits(bursts: list[_Burst]) -> None:
    """Each burst waits for the last one before it, of this step or the step before, that lies where it lies."""
    ends: list[int] = []
    for burst in bursts:
        ends.append((ends[-1] if ends else 0) + len(burst.groups))
    for number, burst in enumerate(bursts):
        before = [(ends[i], bursts[i]) for i in range(number)]
        step_before = [(ends[i] - ends[-1], bursts[i]) for i in range(number, len(bursts))]
        burst.released = max(count for count, other in (*before, *step_before) if other.overlaps(burst))
    # Counts are awaited in order, each of them once.
    reached = bursts[-1].released - ends[-1] if bursts else 0
    for _ in range(2):
        for burst in bursts:
            burst.released = reached = max(burst.released, reached)
        reached -= ends[-1] if ends else 0
