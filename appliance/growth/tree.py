"""The SwarmX tree as a simulation sees it: all nodes of a level are alike, and one of them stands for them."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The nodes of a level. Of those that differ by one child, the fuller one."""

    nodes: int
    children: int  # of each node
    wafers: int  # below each of its children


def tree_levels(num_wafers: int, fan_out: int) -> tuple[Level, ...]:
    """The levels from the root down, as `swarmx_tree` divides them, with at most `fan_out` children of a node."""
    if num_wafers < 1 or fan_out < 2:
        raise ValueError(f"a tree has at least one wafer and two branches, not {num_wafers} and {fan_out}")
    levels: list[Level] = []
    width, wafers = num_wafers, 1
    while not levels or width > 1:
        nodes = -(-width // fan_out)
        children = -(-width // nodes)
        levels.append(Level(nodes=nodes, children=children, wafers=wafers))
        width, wafers = nodes, min(num_wafers, wafers * children)
    return tuple(reversed(levels))


def fan_outs(num_wafers: int) -> Iterator[int]:
    """Those that are worth a try: powers of two, up to one node for all wafers."""
    fan_out = 2
    while fan_out < num_wafers:
        yield fan_out
        fan_out *= 2
    yield max(2, num_wafers)
