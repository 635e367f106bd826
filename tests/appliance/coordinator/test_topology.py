"""Who takes part in a job, and which links there are."""

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
