"""The shape of the SwarmX trees."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waferbox.runtime.swarmx_trees import FAN_IN, SwarmXTree, swarmx_trees, tree_of, tree_size, trees_by_shard
from wsc.v1 import plan_pb2

HOSTS = st.sampled_from("abcd")


def named(role: str, hosts: Sequence[str]) -> dict[str, str]:
    """The host of each member of a role."""
    return {f"{role}-{index}": host for index, host in enumerate(hosts)}


def trees_of(wafers: Sequence[str], swarmx: Sequence[str], shards: Sequence[str]) -> tuple[SwarmXTree, ...]:
    return swarmx_trees(named("wafer", wafers), named("swarmx", swarmx), shards)


def wafers_in_order(tree: SwarmXTree) -> Iterator[str]:
    """The wafers of a tree from left to right, with a check of every node's counts."""
    nodes = {node.name: node for node in tree.nodes}

    def below(name: str) -> list[str]:
        if name not in nodes:
            return [name]
        node = nodes[name]
        parts = [below(child) for child in node.children]
        assert tuple(map(len, parts)) == node.wafers_below
        return [wafer for part in parts for wafer in part]

    yield from below(tree.root.name)


@pytest.mark.parametrize("num_wafers", [*range(2, 40), 64, 65, 100])
def test_on_one_host_every_wafer_has_its_place_once_and_in_order(num_wafers: int) -> None:
    (tree,) = trees_of(["a"] * num_wafers, ["a"] * 1000, ["a"] * 3)
    assert tree.shards == (0, 1, 2)
    assert len(tree.nodes) == tree_size(num_wafers)
    assert {node.name for node in tree.nodes} == {f"swarmx-{i}" for i in range(len(tree.nodes))}
    assert all(1 <= len(node.children) <= FAN_IN for node in tree.nodes)
    assert list(wafers_in_order(tree)) == [f"wafer-{i}" for i in range(num_wafers)]


def test_too_few_nodes_give_one_flat_node() -> None:
    (tree,) = trees_of(["a"] * 6, ["a"] * 2, ["a"])
    assert tree.root.children == tuple(f"wafer-{i}" for i in range(6))
    assert len(tree.nodes) == 1


def test_few_wafers_need_one_node() -> None:
    assert [tree_size(n) for n in (2, 4, 5, 16, 17)] == [1, 1, 3, 5, 8]


@pytest.mark.parametrize("swarmx", ["", "a", "ab"])
def test_a_single_wafer_has_no_tree(swarmx: str) -> None:
    assert trees_of("a", swarmx, "ab") == ()
    assert tree_size(1) == 0


@given(
    wafers=st.lists(HOSTS, min_size=2, max_size=12),
    swarmx=st.lists(HOSTS, min_size=1, max_size=6),
    shards=st.lists(HOSTS, min_size=1, max_size=6),
)
def test_on_any_hosts_each_tree_has_all_wafers_in_order(
    wafers: Sequence[str], swarmx: Sequence[str], shards: Sequence[str]
) -> None:
    trees = trees_of(wafers, swarmx, shards)
    assert sorted(shard for tree in trees for shard in tree.shards) == list(range(len(shards)))
    assert 0 in trees[0].shards
    assert all(trees[number].shards.count(shard) == 1 for shard, number in enumerate(trees_by_shard(trees)))
    names = [f"wafer-{i}" for i in range(len(wafers))]
    for tree in trees:
        first = tree.root.first_wafer
        assert list(wafers_in_order(tree)) == names[first:] + names[:first]
        assert len({node.name for node in tree.nodes}) == len(tree.nodes)


@pytest.mark.parametrize("per_host", [1, 3])
def test_a_node_a_shard_and_wafers_on_each_host_load_every_link_alike(per_host: int) -> None:
    hosts = "abcde"
    trees = trees_of([host for host in hosts for _ in range(per_host)], hosts, hosts)
    assert [tree.shards for tree in trees] == [(i,) for i in range(len(hosts))]
    host_of = {f"wafer-{i}": hosts[i // per_host] for i in range(per_host * len(hosts))}
    host_of |= {f"swarmx-{i}": host for i, host in enumerate(hosts)}
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for tree in trees:
        for node in tree.nodes:
            host = host_of[node.name]
            for child in node.children:
                if host_of[child] != host:
                    sent[host] += 1
                    received[host_of[child]] += 1
    assert sent == received == dict.fromkeys(hosts, len(hosts) - 1)


@pytest.mark.parametrize(("num_hosts", "chains"), [(2, 1), (4, 1), (16, 1), (17, 2), (65, 4), (257, 8)])
def test_the_hosts_beside_the_root_form_chains(num_hosts: int, chains: int) -> None:
    hosts = [f"host-{i}" for i in range(num_hosts)]
    for tree in trees_of(hosts, hosts, hosts)[:: max(1, num_hosts // 8)]:
        (shard,) = tree.shards
        own, *others = tree.root.children
        assert own == f"wafer-{shard}"
        assert len(others) == chains
        assert all(len(node.children) == 2 for node in tree.nodes[1:])
        longest = -(-(num_hosts - 1) // chains)
        assert all(count <= longest for count in tree.root.wafers_below)


@pytest.mark.parametrize("num_wafers", [5, 8, 17])
def test_nodes_on_hosts_of_their_own_form_levels_as_on_one_host(num_wafers: int) -> None:
    """As in containers of which each is a host."""
    size = tree_size(num_wafers)
    hosts = [f"host-{i}" for i in range(num_wafers + size + 1)]
    (tree,) = trees_of(hosts[:num_wafers], hosts[num_wafers:-1], hosts[-1:])
    assert len(tree.nodes) == size
    assert all(len(node.children) <= FAN_IN for node in tree.nodes)
    assert list(wafers_in_order(tree)) == [f"wafer-{i}" for i in range(num_wafers)]


def test_the_tree_of_a_group_is_that_of_its_shard() -> None:
    def tree(trees: Sequence[int], **fields: Any) -> int:
        return tree_of(plan_pb2.Group(id=3, **fields), trees)

    weights, reduction = plan_pb2.GROUP_KIND_WEIGHTS, plan_pb2.GROUP_KIND_REDUCTION
    assert tree([], kind=weights, source_shard=2) == 0
    assert tree([0, 1, 2], kind=weights, source_shard=2) == 2
    assert tree([0, 1, 1], kind=reduction, shards=[1, 2], to_wafers=True) == 1
    assert tree([0, 1, 1], kind=reduction, shards=[0, 1]) == 0
    assert tree([0, 1, 1], kind=reduction, shards=[1], to_coordinator=True) == 0
    assert tree([0, 1], kind=reduction, to_wafers=True) == 1
