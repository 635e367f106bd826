"""A job that has lost a wafer, in whose place none comes, goes on with those that are left."""

from pathlib import Path

import psutil
import pytest
from cluster_rig import SCRIPTS, RunningScript, StartScript, Surroundings, cluster_by_hand, wait_for
from role_server import RoleServer

from benchmarks.network import HERE
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc

ROLES = ("memoryx", "memoryx", "swarmx", "workers", "workers", "wafer", "wafer")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def losses(script: RunningScript) -> list[float]:
    return [float.fromhex(line.split()[1]) for line in script.output.splitlines() if line.split()[0].isdigit()]


def nodes(management: str) -> list[management_pb2.NodeInfo]:
    with make_channel(management) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        return list(stub.ListNodes(management_pb2.ListNodesRequest(), timeout=10.0).nodes)


def test_the_losses_are_those_of_all_wafers(
    start_script: StartScript, tmp_path: Path, cache: Path, role_server: RoleServer
) -> None:
    surroundings = Surroundings(tmp_path / "cluster", cache)
    variables = {"WAFERBOX_REPLACEMENT_SECONDS": "1", "WAFERBOX_RECOVERY_SECONDS": "1"}
    places = [(role, HERE) for role in ROLES]
    with cluster_by_hand(surroundings, role_server, places, host=HERE, started=None, **variables) as management:

        def train(victim: str = "") -> RunningScript:
            options = ("--artifacts", "artifacts", "--num-csx", 2, "--shards", 2, "--steps", 80)
            script = start_script(SCRIPTS / "recovering.py", *options, management=management, WAFERBOX_MIN_NUM_CSX="1")
            script.wait_for_output("30 ")
            if victim:
                (process,) = [node.process_id for node in nodes(management) if node.member == victim]
                psutil.Process(process).kill()
                script.wait_for_error("the job has 1 of 2 wafers from now on, as min_num_csx allows")
            (script.surroundings.folder / "go").touch()
            assert script.wait(120) == 0, script.errors
            return script

        expected, reduced = losses(train()), losses(train("wafer-0"))
        assert len(expected) == 80
        assert reduced == pytest.approx(expected, rel=1e-5)
        assert reduced[:30] == expected[:30]
        assert reduced != expected  # it is not by chance that nothing has changed
        wait_for(lambda: not any(node.job for node in nodes(management)))
        assert len(nodes(management)) == len(ROLES) - 1
