"""The SwarmX tree of a job, between the wafers and MemoryX."""

from collections.abc import Sequence
from dataclasses import dataclass

FAN_IN = 4  # the most children of a SwarmX node, where there are enough nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmXTreeNode:
    """One SwarmX node of a tree. Node 0 is the root. Children are all wafers or all SwarmX nodes, in wafer order."""

    index: int
    parent: int | None
    position: int  # among its parent's children
    wafers: tuple[int, ...] = ()
    children: tuple[int, ...] = ()


def tree_size(num_wafers: int) -> int:
    """Returns the number of SwarmX nodes of a tree over so many wafers."""
    size = 0
    width = num_wafers
    while True:
        width = -(-width // FAN_IN)
        size += width
        if width <= 1:
            return max(1, size)


def swarmx_tree(num_wafers: int, num_available: int) -> tuple[SwarmXTreeNode, ...]:
    """Returns the tree, root first: one node if one is enough, or if too few of at least 1 are available."""
    assert num_wafers >= 1
    assert num_available >= 1
    if num_available < tree_size(num_wafers):
        return (SwarmXTreeNode(index=0, parent=None, position=0, wafers=tuple(range(num_wafers))),)
    # Levels from the wafers up; the members of a level are numbered within it.
    levels: list[list[Sequence[int]]] = []
    width = num_wafers
    while not levels or width > 1:
        levels.append(_even_parts(range(width)))
        width = len(levels[-1])
    levels.reverse()
    first = [0]  # index of the first node of each level
    for level in levels:
        first.append(first[-1] + len(level))
    nodes: list[SwarmXTreeNode] = []
    for depth, level in enumerate(levels):
        for number, members in enumerate(level):
            parent, position = _parent(levels[depth - 1], number) if depth else (None, 0)
            lowest = depth == len(levels) - 1
            nodes.append(
                SwarmXTreeNode(
                    index=first[depth] + number,
                    parent=None if parent is None else first[depth - 1] + parent,
                    position=position,
                    wafers=tuple(members) if lowest else (),
                    children=() if lowest else tuple(first[depth + 1] + member for member in members),
                )
            )
    return tuple(nodes)


def _even_parts(items: Sequence[int]) -> list[Sequence[int]]:
    """Divides items into as few parts of at most FAN_IN as possible, of about equal length."""
    count = -(-len(items) // FAN_IN)
    return [items[part * len(items) // count : (part + 1) * len(items) // count] for part in range(count)]


def _parent(level: list[Sequence[int]], member: int) -> tuple[int, int]:
    for parent, members in enumerate(level):
        if member in members:
            return parent, members.index(member)
    raise AssertionError(f"node {member} has no parent")
