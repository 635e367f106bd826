"""The arena that gradient groups are sent from: which count of released groups a sender waits for.

Groups of the arena are counted in the order in which they are sent, from the begin of the execution: group k of step t
has number (t - 1) * n + k, where n is the number of groups in a step; a group in the loop counts once in each
repetition. A count c says that numbers 0 to c - 1 have been released. Only awaited counts are sent, so an arena in
which nothing overlaps costs no message.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

from waferbox.links.frame import INLINE_BYTES
from waferbox.runtime.loops import body_of, in_order, position_in_step
from waferbox.runtime.schedule import is_for_coordinator_only
from wsc.v1 import plan_pb2

# An empty frame of this group comes down from MemoryX and SwarmX: its step is a count of released groups.
RELEASED_GROUP = 3 << 30


def is_in_arena(group: plan_pb2.Group) -> bool:
    """Whether the group is sent from the arena.

    Small groups, and those for the coordinator alone, are copied into frames. Groups that return to the wafers need no
    count: a wafer has read such a group when it sends the next one.
    """
    return (
        group.kind == plan_pb2.GROUP_KIND_REDUCTION
        and not group.to_wafers
        and group.nbytes > INLINE_BYTES
        and not is_for_coordinator_only(group)
    )


def direct_values(plan: plan_pb2.WaferPlan) -> set[int]:
    """Returns the values that kernels may write to the arena: no later kernel reads them, and no later send has them.

    A later read would be of a place that another kernel may have written.
    """
    groups = {group.id: group for group in plan.groups}
    runs = 0
    made: set[int] = set()
    sent: dict[int, int] = {}  # value -> kernels that ran before it was first sent
    late: set[int] = set()
    for instruction in plan.instructions:
        match instruction.WhichOneof("kind"):
            case "run":
                late.update(value for value in instruction.run.inputs if value in sent)
                made.update(instruction.run.outputs)
                runs += 1
            case "send":
                values = [member.value for member in groups[instruction.send.group].members]
                late.update(value for value in values if sent.setdefault(value, runs) != runs)
    return (made & sent.keys()) - late


class ArenaOrder:
    """The numbers of those groups of an arena that one SwarmX tree carries, in the order of sending. Immutable."""

    def __init__(self, numbers: Sequence[int], num_groups: int) -> None:
        """
        Args:
            numbers: those in a step, from 0.
            num_groups: the groups of the arena that are sent in a step.
        """
        self._numbers = array("q", numbers)
        self._num_groups = num_groups

    def number(self, index: int) -> int:
        """Returns the number in the execution of the group with this index among the tree's. 0: there are none."""
        if not self._numbers:
            return 0
        step, place = divmod(index, len(self._numbers))
        return step * self._num_groups + self._numbers[place]


class ArenaCounts:
    """The counts of one arena. Immutable. Counts of one step up to 0 belong to the step before."""

    def __init__(self, arena: plan_pb2.SendArena) -> None:
        self._arena = arena
        self.num_groups = position_in_step(len(arena.places), arena.loop)  # sent in a step
        self.num_repeated = len(body_of(arena.loop))  # sent in each repetition of the loop
        self.offsets = {place.group: place.offset for place in arena.places}
        self._first = {place.group: position_in_step(i, arena.loop) for i, place in enumerate(arena.places)}
        self._windows = {place.group: place.window for place in arena.places if arena.credited}
        # From 1 to num_groups.
        awaited = {
            (number - place.window - 1) % self.num_groups + 1
            for number, (place, _) in enumerate(in_order(arena.places, arena.loop))
            if arena.credited
        }
        self._awaited_counts = array("q", sorted(awaited))

    @property
    def credited(self) -> bool:
        """Whether any count is awaited."""
        return bool(self._awaited_counts)

    def number(self, group: int, step: int, repetition: int = 0) -> int:
        """Returns the number of a group in the execution."""
        return (step - 1) * self.num_groups + self._first[group] + repetition * self.num_repeated

    def window(self, group: int) -> int | None:
        """Returns how many groups before it may be unreleased when it is written; None: the sender never waits."""
        return self._windows.get(group)

    def awaited(self, group: int) -> int | None:
        """Returns the count for which the sender waits before it writes a group, first; None: it never waits."""
        window = self._windows.get(group)
        return None if window is None else self._first[group] - window

    def count(self, awaited: int, step: int, repetition: int = 0) -> int:
        """Returns a count of one step, or of the first repetition in it, as a count of the execution."""
        return (step - 1) * self.num_groups + awaited + repetition * self.num_repeated

    def awaited_between(self, before: int, now: int) -> Iterator[int]:
        """Yields the awaited counts of the execution above `before` and up to `now`."""
        for count in range(before + 1, now + 1):
            in_step = (count - 1) % self.num_groups + 1
            place = bisect_left(self._awaited_counts, in_step)
            if self._awaited_counts[place : place + 1] == array("q", [in_step]):
                yield count

    def order_of(self, groups: Iterable[int]) -> ArenaOrder:
        """Returns the numbers of those of these groups that are in the arena."""
        own = set(groups)
        places = enumerate(in_order(self._arena.places, self._arena.loop))
        return ArenaOrder([number for number, (place, _) in places if place.group in own], self.num_groups)

    def first_counts(self, groups: Iterable[plan_pb2.Group]) -> dict[int, int]:
        """Returns the count of each shard before it has released any of these groups; none of shards that get none."""
        first: dict[int, int] = {}
        for group in groups:
            if group.id in self.offsets:
                number = self._first[group.id]
                first.update((shard, min(number, first.get(shard, number))) for shard in group.shards)
        return first

    def released_counts(self, groups: Iterable[int]) -> Mapping[int, Sequence[int]]:
        """Returns the counts that a receiver of these groups sends, by the group that it has released before.

        A group in the loop has a count for each repetition, others one. All groups up to the receiver's next one are
        released too. Where the count is 0 it sends nothing.
        """
        own = set(groups)
        places = enumerate(in_order(self._arena.places, self._arena.loop))
        released = [(number, place.group) for number, (place, _) in places if place.group in own]
        once = self._awaited_counts
        awaited = array("q", [0, *once, *(count + self.num_groups for count in once)])
        counts = {group: array("q") for group in own}
        for (number, group), following in zip(released, [*released[1:], *released[:1]], strict=True):
            end = following[0] if following[0] > number else following[0] + self.num_groups
            reached = awaited[bisect_right(awaited, end) - 1]
            counts[group].append(reached if reached > number else 0)
        return counts
