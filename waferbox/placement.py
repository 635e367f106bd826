"""The rule by which states are placed on the shards of MemoryX.

The compiler places states by it. A client that stages initial values before the compile is done follows the same rule,
so that most values are staged on the shard that will keep them.
"""

from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def place_on_shards(sizes: Mapping[K, int], num_shards: int, pinned: Mapping[K, int] | None = None) -> dict[K, int]:
    """Places the largest first, each on the shard that has least so far.

    Args:
        sizes: by key, its size in any unit.
        num_shards: number of shards.
        pinned: keys that already lie on a shard, and count there.

    Returns:
        The shard of each key.
    """
    placed = dict(pinned or {})
    load = [0] * num_shards
    for key, shard in placed.items():
        load[shard] += sizes[key]
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if key not in placed:
            placed[key] = load.index(min(load))
            load[placed[key]] += sizes[key]
    return placed
