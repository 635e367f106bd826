"""What dies in a cluster that was started on this machine is started again."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from cluster_rig import SCRIPTS, StartScript, Surroundings, wait_for
from up_rig import up, waferbox

from interconnect.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

FAULTS = SCRIPTS / "faults.py"

pytestmark = pytest.mark.cluster


@pytest.fixture
def surroundings(tmp_path: Path, cache: Path) -> Iterator[Surroundings]:
    surroundings = Surroundings(tmp_path / "cluster", cache)
    yield surroundings
    surroundings.assert_nothing_left()


def nodes(management: str, role: "node_pb2.Role.ValueType") -> list[management_pb2.NodeInfo]:
    with make_channel(management) as channel:
        listed = management_pb2_grpc.ManagementStub(channel).ListNodes(management_pb2.ListNodesRequest(), timeout=10.0)
    return [node for node in listed.nodes if node.role == role]


def test_a_wafer_that_is_killed_is_replaced_for_the_next_job(
    start_script: StartScript, surroundings: Surroundings
) -> None:
    with up(surroundings, "--wafers", "2") as (cluster, management):
        victim, other = nodes(management, node_pb2.ROLE_WAFER)
        psutil.Process(victim.process_id).kill()
        wait_for(lambda: victim.address not in [node.address for node in nodes(management, node_pb2.ROLE_WAFER)])
        script = start_script(FAULTS, "runs", "--artifacts", "artifacts", "--num-csx", 2, management=management)
        assert script.wait() == 0, script.errors
        there = {node.process_id for node in nodes(management, node_pb2.ROLE_WAFER)}
        assert other.process_id in there
        (new,) = there - {other.process_id}
        assert waferbox(surroundings, "down").returncode == 0
        assert cluster.wait(60) == 0
        assert cluster.stderr is not None
        told = cluster.stderr.read()
    assert f"wafer (pid {victim.process_id}) ended with status -9; started again as pid {new}\n" in told
