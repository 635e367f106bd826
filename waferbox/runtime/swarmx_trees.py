"""The SwarmX trees of a job, between the wafers and MemoryX.

A single wafer is linked to the shards themselves: there is nothing to broadcast and nothing to add, and no tree. For
several wafers on one host there is one tree. Over several hosts there is a tree for each host that keeps shards, rooted
there: it carries the weights and gradients of these shards. The other hosts form a chain, in which each passes chunks
of a group on while the rest of the group arrives; many hosts form several chains. So with a wafer, a shard and a SwarmX
node on each of K hosts, a host's link carries (K - 1) / K of what is streamed and reduced, in and out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isqrt
from typing import Final, NamedTuple

from wsc.v1 import plan_pb2

FAN_IN: Final = 4  # the most children of a SwarmX node, where other nodes are free to come between

# A chain more makes the root's link send each group once more, and a host more in a chain delays it by a chunk. Both
# together take the least time for about as many chains as the root of the number of hosts / the chunks of a group.
CHUNKS: Final = 4  # of a group, as a rule


class _Child(NamedTuple):
    """A child of a node: its name, the number of wafers at or below it, and the number of the first of them."""

    name: str
    num_wafers: int
    first_wafer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """One SwarmX node of a tree. Members of the job are named; a node may be in several trees."""

    name: str
    children: tuple[str, ...]  # in the order of the wafers below them
    wafers_below: tuple[int, ...]  # the number of wafers at or below each child
    first_wafer: int  # the number of the first wafer below it


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmXTree:
    """One tree over all wafers of a job, from the first wafer of its root on, round to the one before that."""

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


def _children(root: str, wafers: Mapping[str, str], swarmx: Mapping[str, str]) -> tuple[list[_Child], list[TreeNode]]:
    """Returns the root's children: the wafers of its host, and chains of the others. Also returns the chains' nodes."""
    number = {name: index for index, name in enumerate(wafers)}
    hosts = [
        (host, [_Child(name, 1, number[name]) for name in members])
        for host, members in groupby(wafers, key=wafers.__getitem__)
    ]
    begin = next((place for place, (host, _) in enumerate(hosts) if host == swarmx[root]), 0)
    children: list[_Child] = []
    others: list[tuple[list[_Child], str | None]] = []  # the wafers of a host, and its SwarmX node
    free = [name for name in swarmx if name != root]
    for host, here in (*hosts[begin:], *hosts[:begin]):
        if host == swarmx[root] and not others:
            children = here
            continue
        node = next((name for name in free if swarmx[name] == host), None)
        if node is not None:
            free.remove(node)
        others.append((here, node))
    count = max(1, isqrt(len(others) // CHUNKS))
    nodes: list[TreeNode] = []
    for chain in range(count):
        part = others[chain * len(others) // count : (chain + 1) * len(others) // count]
        first, its_nodes = _chain(part)
        children = [*children, *first]
        nodes += its_nodes
    return children, nodes


def _chain(hosts: Sequence[tuple[list[_Child], str | None]]) -> tuple[list[_Child], list[TreeNode]]:
    """Returns what is linked to the node before these hosts, and their nodes, each of which is linked to the next.

    The wafers of a host without a node are linked to the node before it, as is a single wafer that is the last.
    """
    nodes: list[TreeNode] = []
    below: list[_Child] = []
    for here, node in reversed(hosts):
        below = [*here, *below]
        if node is not None and len(below) > 1:
            nodes.insert(0, _node(node, below))
            below = [_Child(node, sum(child.num_wafers for child in below), below[0].first_wafer)]
    return below, nodes


def _narrowed(children: list[_Child], free: list[str]) -> tuple[list[_Child], list[TreeNode]]:
    """Puts levels of free nodes between a root and its children, until it has few. Returns these nodes, too."""
    between: list[TreeNode] = []
    while len(children) > FAN_IN and (count := -(-len(children) // FAN_IN)) <= len(free):
        parts = [children[i * len(children) // count : (i + 1) * len(children) // count] for i in range(count)]
        level, free = [_node(name, part) for name, part in zip(free, parts, strict=False)], free[count:]
        children = [_Child(node.name, sum(node.wafers_below), node.first_wafer) for node in level]
        between = [*level, *between]
    return children, between


def _node(name: str, children: Sequence[_Child]) -> TreeNode:
    return TreeNode(
        name=name,
        children=tuple(child.name for child in children),
        wafers_below=tuple(child.num_wafers for child in children),
        first_wafer=children[0].first_wafer,
    )
