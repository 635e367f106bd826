"""Which gradient groups have been released: what the receivers of a SwarmX node say, and what it tells its children."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from nodes.steps.arena import ArenaCounts
from wsc.v1 import plan_pb2

Source = TypeVar("Source")


class Releases(Generic[Source]):
    """The count of groups that all receivers have released; it only grows."""

    def __init__(self, first: Mapping[Source, int]) -> None:
        """first: the receivers, with the count that each of them begins with."""
        self._counts = dict(first)
        self.count = min(first.values(), default=0)

    def add(self, source: Source, count: int) -> bool:
        """A receiver says how many it has released. Returns whether all have released more than before."""
        self._counts[source] = max(self._counts[source], count)
        before, self.count = self.count, min(self._counts.values())
        return self.count > before


class Teller:
    """Tells the children each count that they wait for, once."""

    def __init__(self, counts: ArenaCounts, tell: Callable[[int], None]) -> None:
        self._counts = counts
        self._tell = tell
        self._told = 0

    def reached(self, count: int) -> None:
        """So many groups have been released."""
        for told in self._counts.told_between(self._told, count):
            self._tell(told)
        self._told = max(self._told, count)


def first_counts(counts: ArenaCounts, groups: Sequence[plan_pb2.Group]) -> dict[int, int]:
    """By shard: the count that holds before the shard has released anything. Shards that get no group have none."""
    by_shard: dict[int, list[int]] = {}
    for group in groups:
        if group.id in counts.offsets:
            for shard in group.shards:
                by_shard.setdefault(shard, []).append(group.id)
    return {shard: counts.first_of(own) for shard, own in by_shard.items()}
