"""Who takes part in a job, and which links there are."""

from collections.abc import Sequence

import pytest

from appliance.coordinator.nodes.topology import COORDINATOR, Topology
from wsc.v1 import management_pb2, node_pb2


def test_in_layer_pipelined_mode_a_wafer_has_its_workers_and_the_coordinator() -> None:
    roles = (node_pb2.ROLE_WAFER, node_pb2.ROLE_WORKER, node_pb2.ROLE_WORKER)
    topology = Topology.build([management_pb2.NodeInfo(role=role) for role in roles], 2)
    names = ["wafer-0", "worker-0", "worker-1"]
    assert [member.name for member in topology.members()] == names
    assert [member.name for member in topology.state_keepers] == ["wafer-0"]
    links = topology.links({name: node_pb2.LinkEndpoint() for name in (*names, COORDINATOR)})
    assert {
        name: [(spec.purpose, spec.index, spec.peer, spec.dial) for spec in specs] for name, specs in links.items()
    } == {
        "wafer-0": [
            (node_pb2.LINK_PURPOSE_WORKER, 0, "worker-0", False),
            (node_pb2.LINK_PURPOSE_WORKER, 1, "worker-1", False),
            (node_pb2.LINK_PURPOSE_COORDINATOR, 0, COORDINATOR, True),
        ],
        "worker-0": [(node_pb2.LINK_PURPOSE_WAFER, 0, "wafer-0", True)],
        "worker-1": [(node_pb2.LINK_PURPOSE_WAFER, 0, "wafer-0", True)],
        COORDINATOR: [(node_pb2.LINK_PURPOSE_WAFER, 0, "wafer-0", False)],
    }
    tokens = [spec.token for specs in links.values() for spec in specs]
    assert len(set(tokens)) == len(tokens) // 2


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_single_wafer_is_linked_to_each_shard_and_the_coordinator(num_shards: int) -> None:
    numbers = {node_pb2.ROLE_WAFER: 1, node_pb2.ROLE_MEMORYX: num_shards, node_pb2.ROLE_SWARMX: 1}
    nodes = [management_pb2.NodeInfo(role=role) for role, count in numbers.items() for _ in range(count)]
    topology = Topology.build(nodes, 0)
    shards = [f"memoryx-{i}" for i in range(num_shards)]
    assert names_of(topology) == [*shards, "wafer-0"]
    assert topology.trees_by_shard == ()
    links = topology.links({name: node_pb2.LinkEndpoint() for name in (*names_of(topology), COORDINATOR)})
    assert [(spec.purpose, spec.index, spec.peer) for spec in links["wafer-0"]] == [
        *((node_pb2.LINK_PURPOSE_SHARD, index, name) for index, name in enumerate(shards)),
        (node_pb2.LINK_PURPOSE_COORDINATOR, 0, COORDINATOR),
    ]
    for name in shards:
        towards_wafers = [spec for spec in links[name] if spec.purpose == node_pb2.LINK_PURPOSE_WAFER]
        assert [(spec.index, spec.peer) for spec in towards_wafers] == [(0, "wafer-0")]
    assert [(spec.purpose, spec.peer) for spec in links[COORDINATOR]] == [
        (node_pb2.LINK_PURPOSE_WAFER, "wafer-0"),
        (node_pb2.LINK_PURPOSE_SHARD, "memoryx-0"),
    ]


def test_a_job_that_has_one_wafer_left_has_no_tree() -> None:
    numbers = {node_pb2.ROLE_WAFER: 2, node_pb2.ROLE_WORKER: 2, node_pb2.ROLE_MEMORYX: 1, node_pb2.ROLE_SWARMX: 1}
    nodes = [management_pb2.NodeInfo(role=role) for role, count in numbers.items() for _ in range(count)]
    reduced = Topology.build(nodes, 1).reduced(1, ["wafer-0"])
    assert names_of(reduced) == ["memoryx-0", "wafer-0", "worker-0"]
    assert not reduced.trees


def test_a_node_with_the_id_of_another_is_another_where_management_has_been_started_anew() -> None:
    roles = (node_pb2.ROLE_WAFER, node_pb2.ROLE_WORKER)
    before = Topology.build([management_pb2.NodeInfo(role=role, node_id="n0", instance="a") for role in roles], 1)
    nodes = [
        management_pb2.NodeInfo(node_id="n0", instance="b", member="wafer-0"),
        management_pb2.NodeInfo(node_id="n0", instance="a", member="worker-0"),
    ]
    (wafer, worker), (_, worker_before) = before.with_nodes(nodes, ["wafer-0", "worker-0"]).members(), before.members()
    assert worker is worker_before
    assert wafer.node.instance == "b"


def test_a_member_that_is_not_attached_gets_its_new_lease() -> None:
    """Its node may have worked for another job meanwhile, with a later lease than the one that the member had."""
    before = Topology.build([management_pb2.NodeInfo(role=node_pb2.ROLE_WORKER, node_id="n0", lease="first")], 1)
    node = management_pb2.NodeInfo(node_id="n0", member="worker-0", lease="second")
    assert [member.node.lease for member in before.with_nodes([node], []).members()] == ["second"]
    assert [member.node.lease for member in before.with_nodes([node], ["worker-0"]).members()] == ["first"]


def test_each_node_of_a_tree_knows_how_many_wafers_are_below_its_children() -> None:
    numbers = {node_pb2.ROLE_WAFER: 5, node_pb2.ROLE_WORKER: 5, node_pb2.ROLE_MEMORYX: 1, node_pb2.ROLE_SWARMX: 3}
    nodes = [management_pb2.NodeInfo(role=role) for role, count in numbers.items() for _ in range(count)]
    topology = Topology.build(nodes, 1)
    links = topology.links({name: node_pb2.LinkEndpoint() for name in (*names_of(topology), COORDINATOR)})
    assert topology.trees_by_shard == ()
    assert {name: [n for _, _, n in children(links[name])] for name in ("swarmx-0", "swarmx-1", "swarmx-2")} == {
        "swarmx-0": [2, 3],
        "swarmx-1": [1, 1],
        "swarmx-2": [1, 1, 1],
    }


def test_shards_on_two_hosts_have_two_trees() -> None:
    role_of_host = [
        (role, host)
        for host in ("a", "b")
        for role in (node_pb2.ROLE_WAFER, node_pb2.ROLE_WAFER, node_pb2.ROLE_MEMORYX, node_pb2.ROLE_SWARMX)
    ]
    topology = Topology.build([management_pb2.NodeInfo(role=role, host=host) for role, host in role_of_host], 0)
    links = topology.links({name: node_pb2.LinkEndpoint() for name in (*names_of(topology), COORDINATOR)})
    assert topology.trees_by_shard == [0, 1]
    # Each is the root of a tree, and has the wafers of its host in the other one.
    assert children(links["swarmx-0"]) == [
        ("wafer-0", 0, 1),
        ("wafer-1", 0, 1),
        ("swarmx-1", 0, 2),
        ("wafer-0", 1, 1),
        ("wafer-1", 1, 1),
    ]
    parents = {
        name: [(spec.index, spec.peer) for spec in specs if spec.purpose == node_pb2.LINK_PURPOSE_PARENT]
        for name, specs in links.items()
    }
    assert parents["wafer-3"] == [(0, "swarmx-1"), (1, "swarmx-1")]
    assert (parents["swarmx-0"], parents["swarmx-1"]) == ([(1, "swarmx-1")], [(0, "swarmx-0")])
    shards = {
        name: [(spec.index, spec.peer) for spec in specs if spec.purpose == node_pb2.LINK_PURPOSE_SWARMX]
        for name, specs in links.items()
    }
    # Tree 0 carries what both receive.
    assert (shards["memoryx-0"], shards["memoryx-1"]) == ([(0, "swarmx-0")], [(0, "swarmx-0"), (1, "swarmx-1")])
    keys = [(name, spec.purpose, spec.index) for name, specs in links.items() for spec in specs]
    assert len(set(keys)) == len(keys)


def test_the_trees_are_those_of_the_first_hosts() -> None:
    nodes = [
        management_pb2.NodeInfo(role=role, host=host, member=member)
        for role, host, member in (
            (node_pb2.ROLE_WAFER, "a", "wafer-0"),
            (node_pb2.ROLE_WAFER, "b", "wafer-1"),
            (node_pb2.ROLE_MEMORYX, "a", "memoryx-0"),
            (node_pb2.ROLE_MEMORYX, "b", "memoryx-1"),
            (node_pb2.ROLE_SWARMX, "b", "swarmx-0"),
            (node_pb2.ROLE_SWARMX, "a", "swarmx-1"),
        )
    ]
    hosts = {"wafer-0": "a", "wafer-1": "b", "memoryx-0": "a", "memoryx-1": "b", "swarmx-0": "a", "swarmx-1": "b"}
    assert (
        Topology.build(nodes, 0, hosts).trees
        == Topology.build(
            [management_pb2.NodeInfo(role=n.role, host=hosts[n.member], member=n.member) for n in nodes], 0
        ).trees
    )
    assert [tree.root.name for tree in Topology.build(nodes, 0).trees] == ["swarmx-1", "swarmx-0"]


def names_of(topology: Topology) -> list[str]:
    return [member.name for member in topology.members()]


def children(specs: Sequence[node_pb2.LinkSpec]) -> list[tuple[str, int, int]]:
    """The children of a SwarmX node: name, tree, and the wafers below."""
    return [(s.peer, s.tree, s.num_wafers) for s in specs if s.purpose == node_pb2.LINK_PURPOSE_CHILD]
