"""Lays out the arena from which gradient groups are sent: a ring, in which the groups of a segment lie together.

A wafer writes a segment's gradients while those of the segment before may still be read, so the ring has room for the
two largest consecutive segments. If the ring can hold all groups of the step, each group has its own place, and no
group waits for another. Where memory is short, the ring has room for the largest segment alone.

The groups of a loop have the same places in each repetition, and wait for as much as the strictest repetition needs.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Final

from waferbox.links.elements import aligned
from waferbox.runtime.arena import direct_values, is_in_arena
from waferbox.runtime.loops import body_of, position_in_step
from wsc.v1 import plan_pb2

# Additional room, so that small segments run on while the updates of several earlier ones are still to be made.
SLACK_BYTES: Final = 16 << 20


@dataclass(slots=True)
class _Burst:
    """Groups that must lie in the arena at the same time, as one is written before another is sent.

    Attributes:
        groups: the groups, in the order in which they are sent.
        begin: position of the instruction that first writes one.
        last_sent: position of the instruction that sends the last one.
        offset: its begin in the arena, in bytes.
        window: the number of groups before it that may be unreleased when it is written.
    """

    groups: list[plan_pb2.Group]
    begin: int
    last_sent: int
    offset: int = 0
    window: int = 0

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
    end = 0
    arena = plan_pb2.SendArena()
    body = body_of(plan.loop)
    for burst in bursts:
        burst.offset = end if end + burst.nbytes <= room else 0
        end = burst.offset + burst.nbytes
        arena.nbytes = max(arena.nbytes, end)
        offset = burst.offset
        for group in burst.groups:
            if burst.last_sent in body:
                if not arena.loop.times:
                    arena.loop.begin, arena.loop.times = len(arena.places), plan.loop.times
                arena.loop.end = len(arena.places) + 1
            arena.places.add(group=group.id, offset=offset)
            offset += aligned(group.nbytes)
    # A place in the loop is written again in each repetition.
    arena.credited = room < sum(sizes) or arena.loop.times > 0
    if arena.credited:
        _set_windows(bursts, arena)
    return arena


def is_sent_where_it_is_written(plan: plan_pb2.WaferPlan) -> bool:
    """Whether each repetition of the loop, if it sends gradients, ends with none written that is not sent."""
    body, bursts = body_of(plan.loop), _bursts(plan)
    if not any(burst.last_sent in body for burst in bursts):
        return True
    return all((b.begin < edge) == (b.last_sent < edge) for b in bursts for edge in (body.start, body.stop))


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
                    before = bursts.pop()
                    together, begin = before.groups + together, min(begin, before.begin)
                bursts.append(_Burst(together, begin, position))
    return bursts


def _set_windows(bursts: list[_Burst], arena: plan_pb2.SendArena) -> None:
    """Sets the windows: a group is written when the last earlier burst was released that its own burst overlaps.

    The earlier burst is one of this step, or of the step before, whose counts are at most 0.
    """
    sequence = _in_order(bursts, arena.loop)
    num_groups = position_in_step(len(arena.places), arena.loop)
    ends = [first + len(burst.groups) for burst, first in sequence]
    for burst, first in sequence:
        burst.window = first + num_groups  # more than any
    for index, (burst, first) in enumerate(sequence):
        # The latest comes first. It is near, as the ring has room for few bursts; the burst itself is the farthest.
        before = ((ends[i], sequence[i][0]) for i in range(index - 1, -1, -1))
        step_before = ((ends[i] - num_groups, sequence[i][0]) for i in range(len(sequence) - 1, index - 1, -1))
        released = next(count for count, other in chain(before, step_before) if other.overlaps(burst))
        burst.window = min(burst.window, first - released)
    # A burst awaits no smaller count than the burst before it, so that counts are awaited in ascending order. The first
    # pass gives what the last burst of a step has awaited, which is where the first one of the next step begins. What a
    # repetition of the loop awaits, all do.
    reached = -2 * num_groups
    is_changed = True
    while is_changed:
        is_changed = False
        for burst, first in sequence:
            if first - burst.window < reached:
                burst.window, is_changed = first - reached, True
            reached = first - burst.window
        reached -= num_groups
    windows = (burst.window + number for burst in bursts for number in range(len(burst.groups)))
    for place, window in zip(arena.places, windows, strict=True):
        place.window = window


def _in_order(bursts: list[_Burst], loop: plan_pb2.Loop) -> list[tuple[_Burst, int]]:
    """The bursts of a step in order, with the number of the first group of each.

    Of a loop, the first, second and last repetition: further ones follow one like themselves.
    """
    body, first = body_of(loop), 0
    parts: tuple[list[tuple[_Burst, int]], ...] = ([], [], [])  # before the loop, in it, and behind it
    for burst in bursts:
        part = (first >= body.start) + (first >= body.stop) if body else 0
        parts[part].append((burst, position_in_step(first, loop)))
        first += len(burst.groups)
    repetitions = sorted({0, 1, loop.times - 1}) if body else []
    looped = [(burst, number + len(body) * k) for k in repetitions for burst, number in parts[1]]
    return [*parts[0], *looped, *parts[2]]
