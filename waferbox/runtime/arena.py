"""The arena that gradient groups are sent from, as all roles understand it: who waits for which count of releases.

Counts are of groups of the arena, in the order in which they are sent, since the execution began: group k of step t is
number (t - 1) * n + k, of n groups. A count c says that numbers 0 to c - 1 have been released. Only the counts that
somebody waits for are told, so an arena in which nothing overlaps costs no message.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from waferbox.links.frame import INLINE_BYTES
from waferbox.runtime.schedule import is_for_coordinator_only
from wsc.v1 import plan_pb2

# An empty frame of this group comes down from MemoryX and SwarmX: its step is a count of released groups.
RELEASED_GROUP = 3 << 30


def is_in_arena(group: plan_pb2.Group) -> bool:
    """Whether the group is sent from the arena.

    Small groups, and those for the coordinator alone, are copied into frames. What comes back to the wafers is read by
    the wafers, who have read it when they send it again.
    """
    return (
        group.kind == plan_pb2.GROUP_KIND_REDUCTION
        and not group.to_wafers
        and group.nbytes > INLINE_BYTES
        and not is_for_coordinator_only(group)
    )


def direct_values(plan: plan_pb2.WaferPlan) -> set[int]:
    """Values that kernels may write where they are sent from: no later kernel reads them, and no later send has them.

    What is read behind the next kernel would be read from a place that may have been written again.
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
    """The counts of one arena. `awaited` and `told` are of one step: those up to 0 belong to the step before."""

    def __init__(self, arena: plan_pb2.SendArena) -> None:
        self.num_groups = len(arena.places)
        self.offsets = {place.group: place.offset for place in arena.places}
        self._index = {place.group: index for index, place in enumerate(arena.places)}
        self._awaited = {
            place.group: index - place.window for index, place in enumerate(arena.places) if arena.credited
        }
        # From 1 to num_groups: somebody waits for these.
        self._awaited_counts = sorted({(count - 1) % self.num_groups + 1 for count in self._awaited.values()})

    @property
    def credited(self) -> bool:
        """Whether anybody waits for a count."""
        return bool(self._awaited_counts)

    def number(self, group: int, step: int) -> int:
        """The group's number in the execution."""
        return (step - 1) * self.num_groups + self._index[group]

    def awaited(self, group: int) -> int | None:
        """The count for which the group's sender waits before it writes the group; None if it never waits."""
        return self._awaited.get(group)

    def count(self, awaited: int, step: int) -> int:
        """A count of one step as one of the execution."""
        return (step - 1) * self.num_groups + awaited

    def awaited_between(self, before: int, now: int) -> Iterator[int]:
        """Counts of the execution that somebody waits for, above `before` and up to `now`."""
        for count in range(before + 1, now + 1):
            if (count - 1) % self.num_groups + 1 in self._awaited_counts:
                yield count

    def first_of(self, groups: Iterable[int]) -> int:
        """The count that holds before any of these groups is released."""
        return min(self._index[group] for group in groups)

    def released_count_after(self, group: int, groups: Iterable[int]) -> int | None:
        """What a receiver that gets `groups` alone tells when it has released one of them; None if nothing.

        All groups up to its next one are released, as far as it is concerned.
        """
        own = sorted(self._index[each] for each in groups)
        own.append(own[0] + self.num_groups)
        released = self._index[group]
        following = own[bisect_right(own, released)]
        told = [*self._awaited_counts, *(count + self.num_groups for count in self._awaited_counts)]
        reached = bisect_right(told, following)
        return told[reached - 1] if reached and told[reached - 1] > released else None
