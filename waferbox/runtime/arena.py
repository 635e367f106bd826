"""The arena that gradient groups are sent from: which count of released groups a sender waits for.

Groups of the arena are counted in the order in which they are sent, from the begin of the execution: group k of step t
has number (t - 1) * n + k, where n is the number of groups. A count c says that numbers 0 to c - 1 have been released.
Only awaited counts are sent, so an arena in which nothing overlaps costs no message.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping

from waferbox.links.frame import INLINE_BYTES
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


class ArenaCounts:
    """The counts of one arena. Immutable. Counts of one step up to 0 belong to the step before."""

    def __init__(self, arena: plan_pb2.SendArena) -> None:
        self.num_groups = len(arena.places)
        self.offsets = {place.group: place.offset for place in arena.places}
        self._index = {place.group: index for index, place in enumerate(arena.places)}
        self._awaited = {
            place.group: index - place.window for index, place in enumerate(arena.places) if arena.credited
        }
        # From 1 to num_groups.
        self._awaited_counts = {(count - 1) % self.num_groups + 1 for count in self._awaited.values()}

    @property
    def credited(self) -> bool:
        """Whether any count is awaited."""
        return bool(self._awaited_counts)

    def number(self, group: int, step: int) -> int:
        """Returns the number of a group in the execution."""
        return (step - 1) * self.num_groups + self._index[group]

    def awaited(self, group: int) -> int | None:
        """Returns the count for which the sender waits before it writes a group; None: it never waits."""
        return self._awaited.get(group)

    def count(self, awaited: int, step: int) -> int:
        """Returns a count of one step as a count of the execution."""
        return (step - 1) * self.num_groups + awaited

    def awaited_between(self, before: int, now: int) -> Iterator[int]:
        """Yields the awaited counts of the execution above `before` and up to `now`."""
        for count in range(before + 1, now + 1):
            if (count - 1) % self.num_groups + 1 in self._awaited_counts:
                yield count

    def first_of(self, groups: Iterable[int]) -> int:
        """Returns the count that holds before any of these groups is released."""
        return min(self._index[group] for group in groups)

    def released_counts(self, groups: Iterable[int]) -> Mapping[int, int]:
        """Returns the counts that a receiver of these groups sends, by the group that it has released before.

        All groups up to its next one are released too. After a group that is left out it sends nothing.
        """
        own = sorted(groups, key=self._index.__getitem__)
        released = [self._index[group] for group in own]
        following = [*released[1:], *(index + self.num_groups for index in released[:1])]
        once = sorted(self._awaited_counts)
        awaited = [0, *once, *(count + self.num_groups for count in once)]
        reached = (awaited[bisect_right(awaited, index) - 1] for index in following)
        return {group: count for group, index, count in zip(own, released, reached, strict=True) if count > index}
