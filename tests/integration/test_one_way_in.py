"""A script that reaches nothing of the cluster but its ingress."""

import contextlib
from pathlib import Path

import psutil
import pytest
from cluster_rig import StartScript, cluster_by_hand, wait_for

from benchmarks.network import HERE
from interconnect.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

TRAIN = Path(__file__).parents[2] / "examples" / "fc_digits" / "train.py"

pytestmark = pytest.mark.cluster


def ingress_of(management: str) -> str:
    with make_channel(management) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        nodes = stub.ListNodes(management_pb2.ListNodesRequest(), timeout=5.0).nodes
    (ingress,) = [node.address for node in nodes if node.role == node_pb2.ROLE_INGRESS]
    return ingress


def test_a_script_trains_and_saves_through_the_ingress(start_script: StartScript, cache: Path, tmp_path: Path) -> None:
    places = [(role, HERE) for role in ("appliance.ingress", "memoryx", "swarmx", "workers", "wafer")]
    with cluster_by_hand(tmp_path / "cluster", cache, places) as management:
        ingress = ingress_of(management)
        arguments = ["--num-csx", 1, "--num-steps", 20, "--checkpoint-steps", 10, "--model-dir", tmp_path / "model"]
        # Within one host, links would be sockets that are no ports.
        script = start_script(TRAIN, *arguments, management=ingress, WAFERBOX_LANE="grpc")
        process = psutil.Process(script.process.pid)
        ports: set[int] = set()

        def has_ended() -> bool:
            with contextlib.suppress(psutil.Error):
                ports.update(link.raddr.port for link in process.net_connections("inet") if link.raddr)
            return script.process.poll() is not None

        wait_for(has_ended)
        assert script.wait() == 0, script.errors
    assert ports == {int(ingress.rpartition(":")[2])}
    assert sorted(path.name for path in (tmp_path / "model").glob("*.mdl")) == [
        "checkpoint_10.mdl",
        "checkpoint_20.mdl",
    ]
