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
