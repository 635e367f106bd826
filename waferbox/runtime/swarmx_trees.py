"""The SwarmX trees of a job, between the wafers and MemoryX.

A single wafer is linked to the shards themselves: there is nothing to broadcast and nothing to add, and no tree. For
several wafers on one host there is one tree. Over several hosts there is a tree for each host that keeps shards, rooted
there: it carries the weights and gradients of these shards. Each other host gets a frame once. So with a wafer, a shard
and a SwarmX node on each of K hosts, a host's link carries (K - 1) / K of what is streamed and reduced, in and out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from wsc.v1 import plan_pb2

FAN_IN = 4  # the most children of a SwarmX node, where other nodes are free to come between

# A child of a node: its name, and the number of wafers at or below it.
Child = tuple[str, int]


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
    """Returns the number of SwarmX nodes between so many wafers and MemoryX, on one host."""
    size = 0
    width = num_wafers
    while width > 1:
        width = -(-width // FAN_IN)
        size += width
    return size


def swarmx_trees(wafers: Mapping[str, str], swarmx: Mapping[str, str], shards: Sequence[str]) -> tuple[SwarmXTree, ...]:
    """Returns the trees of a job, by their lowest shard; none for a single wafer.

    Args:
        wafers: the host of each wafer, by the name of the member, in order.
        swarmx: likewise of each SwarmX node; at least one for several wafers.
        shards: the host of each shard; at least one.
    """
    if len(wafers) == 1:
        return ()
    if len({*wafers.values(), *swarmx.values(), *shards}) == 1:
        roots = [next(iter(swarmx))] * len(shards)
    else:
        roots = _roots(swarmx, shards)
    trees = []
    for root in dict.fromkeys(roots):
        children, nodes = _children(root, wafers, swarmx)
        used = {*roots, *(node.name for node in nodes)}
        children, between = _narrowed(children, [name for name in swarmx if name not in used])
        numbers = tuple(shard for shard, its_root in enumerate(roots) if its_root == root)
        trees.append(SwarmXTree(shards=numbers, nodes=(_node(root, children), *between, *nodes)))
    return tuple(trees)


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


def _roots(swarmx: Mapping[str, str], shards: Sequence[str]) -> list[str]:
    """Returns the SwarmX node at which each shard's tree is rooted: on its host in turn, or any if there is none."""
    roots = []
    for shard, host in enumerate(shards):
        at_host = [name for name, its_host in swarmx.items() if its_host == host]
        number = shards[:shard].count(host) if at_host else shard
        choices = at_host or list(swarmx)
        roots.append(choices[number % len(choices)])
    return roots


def _children(root: str, wafers: Mapping[str, str], swarmx: Mapping[str, str]) -> tuple[list[Child], list[TreeNode]]:
    """Returns the root's children, and the nodes among them: one for each other host with several wafers.

    The root sends to all hosts itself: each byte crosses the fewest links so, and waits nowhere.
    """
    children: list[Child] = []
    nodes: list[TreeNode] = []
    free = [name for name in swarmx if name != root]
    for host, members in groupby(wafers, key=wafers.__getitem__):
        here = [(name, 1) for name in members]
        node = next((name for name in free if swarmx[name] == host), None)
        if len(here) == 1 or host == swarmx[root] or node is None:
            children.extend(here)
            continue
        free.remove(node)
        nodes.append(_node(node, here))
        children.append((node, len(here)))
    return children, nodes


def _narrowed(children: list[Child], free: list[str]) -> tuple[list[Child], list[TreeNode]]:
    """Puts levels of free nodes between a root and its children, until it has few. Returns these nodes, too."""
    between: list[TreeNode] = []
    while len(children) > FAN_IN and (count := -(-len(children) // FAN_IN)) <= len(free):
        parts = [children[i * len(children) // count : (i + 1) * len(children) // count] for i in range(count)]
        level, free = [_node(name, part) for name, part in zip(free, parts, strict=False)], free[count:]
        children = [(node.name, sum(node.wafers_below)) for node in level]
        between = [*level, *between]
    return children, between


def _node(name: str, children: Iterable[Child]) -> TreeNode:
    names, wafers_below = zip(*children, strict=True)
    return TreeNode(name=name, children=names, wafers_below=wafers_below)
