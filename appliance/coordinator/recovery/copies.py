"""Which member keeps copies of whose recovery points: the next that does not keep its own in the same folder."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """A member that has kept its own file of a point."""

    name: str
    host: str
    folder: str  # equal for those who share it; empty: not known


def choose_copiers(keepers: Sequence[Keeper]) -> Mapping[str, str]:
    """Who keeps a copy, by the name of the member whose file it is; without those for whom there is nobody.

    On another host if there is one, and no one more copies than need be. keepers: in the order of their numbers.
    """
    chosen: dict[str, str] = {}
    load: Counter[str] = Counter()
    for number, keeper in enumerate(keepers):
        following = [*keepers[number + 1 :], *keepers[:number]]
        others = [other for other in following if keeper.folder and other.folder not in ("", keeper.folder)]
        if others:
            # The first of the least, in this order.
            copier = min(others, key=lambda other: (other.host == keeper.host, load[other.name]))
            chosen[keeper.name] = copier.name
            load[copier.name] += 1
    return chosen
