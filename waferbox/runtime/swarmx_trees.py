"""The SwarmX trees of a job, between the wafers and MemoryX.

On one host there is one tree. Over several hosts there is a tree for each host that keeps shards, rooted there: it
carries the weights and gradients of these shards. Each other host gets a frame once. So with a wafer, a shard and a
SwarmX node on each of K hosts, a host's link carries (K - 1) / K of what is streamed and reduced, in and out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from wsc.v1 import plan_pb2

FAN_IN = 4  # the most children of a SwarmX node in a tree on one host, where there are enough nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """One SwarmX node of a tree. Members of the job are named; a node may be in several trees."""

    name: str
    children: tuple[str, ...]  # in the order of the wafers below them
    wafers_below: tuple[int, ...]  # the number of wafers at or below each child


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmXTree:
    """One tree over all wafers of a job."""

    shards: tuple[int, ...]  # those whose weights and gradients it carries
    nodes: tuple[TreeNode, ...]  # the root first

    @property
    def root(self) -> TreeNode:
        """The node at the shards."""
        return self.nodes[0]


def tree_size(num_wafers: int) -> int:
    """Returns the number of SwarmX nodes of a tree over so many wafers on one host."""
    size = 0
    width = num_wafers
    while True:
        width = -(-width // FAN_IN)
        size += width
        if width <= 1:
            return max(1, size)


def swarmx_trees(wafers: Mapping[str, str], swarmx: Mapping[str, str], shards: Sequence[str]) -> tuple[SwarmXTree, ...]:
    """Returns the trees of a job, by their lowest shard.

    Args:
        wafers: the host of each wafer, by the name of the member, in order.
        swarmx: likewise of each SwarmX node; at least one.
        shards: the host of each shard; at least one.
    """
    if len({*wafers.values(), *swarmx.values(), *shards}) == 1:
        return (SwarmXTree(shards=tuple(range(len(shards))), nodes=_levels(list(wafers), list(swarmx))),)
    roots = _roots(swarmx, shards)
    return tuple(
        SwarmXTree(
            shards=tuple(shard for shard, its_root in enumerate(roots) if its_root == root),
            nodes=_over_hosts(root, wafers, swarmx),
        )
        for root in dict.fromkeys(roots)
    )


def trees_by_shard(trees: Sequence[SwarmXTree]) -> list[int]:
    """Returns the number of each shard's tree, by shard."""
    number_of = {shard: number for number, tree in enumerate(trees) for shard in tree.shards}
    return [number_of[shard] for shard in range(len(number_of))]


def tree_of(group: plan_pb2.Group, trees: Sequence[int]) -> int:
    """Returns the number of the tree that carries a group.

    Tree 0 carries the groups for the coordinator, and those for shards of several trees.

    Args:
        group: a group of weights, or one that is reduced.
        trees: the number of each shard's tree; empty: there is one tree.
    """
    if not trees or group.to_coordinator:
        return 0
    if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
        return trees[group.source_shard]
    targets = {trees[shard] for shard in group.shards}
    if not targets:
        return trees[group.id % len(trees)]  # combined for the wafers alone: any tree can carry it
    return targets.pop() if len(targets) == 1 else 0


# --- One host ---------------------------------------------------------------------------------------------------------


def _levels(wafers: Sequence[str], swarmx: Sequence[str]) -> tuple[TreeNode, ...]:
    """Returns a tree of nodes with few children each; one node if one is enough, or if too few are available."""
    if len(swarmx) < tree_size(len(wafers)):
        return (TreeNode(name=swarmx[0], children=tuple(wafers), wafers_below=(1,) * len(wafers)),)
    # From the wafers up: the children of each node, numbered within their level, and the wafers below each of them.
    levels: list[list[tuple[range, tuple[int, ...]]]] = []
    below = [1] * len(wafers)
    while not levels or len(below) > 1:
        levels.append([(part, tuple(below[part.start : part.stop])) for part in _even_parts(len(below))])
        below = [sum(wafers) for _, wafers in levels[-1]]
    nodes: list[TreeNode] = []
    for height in reversed(range(len(levels))):
        next_level = swarmx[len(nodes) + len(levels[height]) :] if height else wafers
        for part, wafers_below in levels[height]:
            names = tuple(next_level[i] for i in part)
            nodes.append(TreeNode(name=swarmx[len(nodes)], children=names, wafers_below=wafers_below))
    return tuple(nodes)


def _even_parts(length: int) -> Iterator[range]:
    """Divides so many children into as few parts of at most FAN_IN as possible, of about equal length."""
    count = -(-length // FAN_IN)
    for part in range(count):
        yield range(part * length // count, (part + 1) * length // count)


# --- Several hosts ----------------------------------------------------------------------------------------------------


def _roots(swarmx: Mapping[str, str], shards: Sequence[str]) -> list[str]:
    """Returns the SwarmX node at which each shard's tree is rooted: on its host in turn, or any if there is none."""
    roots = []
    for shard, host in enumerate(shards):
        at_host = [name for name, its_host in swarmx.items() if its_host == host]
        number = shards[:shard].count(host) if at_host else shard
        choices = at_host or list(swarmx)
        roots.append(choices[number % len(choices)])
    return roots


def _over_hosts(root: str, wafers: Mapping[str, str], swarmx: Mapping[str, str]) -> tuple[TreeNode, ...]:
    """Returns a tree in which each host with several wafers has one node for them, if it has a node.

    The root sends to all hosts itself: each byte crosses the fewest links so, and waits nowhere.
    """
    nodes: list[TreeNode] = []
    children: list[tuple[str, int]] = []
    free = [name for name in swarmx if name != root]
    for host, members in groupby(wafers, key=wafers.__getitem__):
        names = tuple(members)
        node = next((name for name in free if swarmx[name] == host), None)
        if len(names) == 1 or host == swarmx[root] or node is None:
            children.extend((name, 1) for name in names)
            continue
        free.remove(node)
        nodes.append(TreeNode(name=node, children=names, wafers_below=(1,) * len(names)))
        children.append((node, len(names)))
    top = TreeNode(name=root, children=tuple(n for n, _ in children), wafers_below=tuple(n for _, n in children))
    return (top, *nodes)
