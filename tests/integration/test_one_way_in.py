"""A script that reaches nothing of the cluster but its ingress."""

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster_rig import SCRIPTS, StartScript, Surroundings, cluster_by_hand, wait_for

from benchmarks import by_hand
from benchmarks.network import HERE
from interconnect.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

TRAIN = Path(__file__).parents[2] / "examples" / "fc_digits" / "train.py"

pytestmark = pytest.mark.cluster


def test_a_script_trains_and_saves_through_the_ingress(start_script: StartScript, cache: Path, tmp_path: Path) -> None:
    places = [(role, HERE) for role in ("appliance.ingress", "memoryx", "swarmx", "workers", "wafer")]
    with cluster_by_hand(tmp_path / "cluster", cache, places) as management:
        (ingress,) = ingresses(management)
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


class RestartedIngress:
    """An ingress that is killed, and started anew at its address."""

    def __init__(self, surroundings: Surroundings, management: str) -> None:
        self._surroundings = surroundings
        self._management = management
        self._start("127.0.0.1:0")
        wait_for(lambda: ingresses(management))
        (self.address,) = ingresses(management)

    def _start(self, listen: str) -> None:
        command = [sys.executable, "-m", "appliance.ingress", "--management", self._management, "--listen", listen]
        with (self._surroundings.folder / "ingress.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._surroundings.variables(), stdin=subprocess.DEVNULL, stderr=log
            )

    def restart(self) -> None:
        self._process.kill()
        self._process.wait()
        self._start(self.address)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def ingresses(management: str) -> list[str]:
    with make_channel(management) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        nodes = stub.ListNodes(management_pb2.ListNodesRequest(), timeout=5.0).nodes
    return [node.address for node in nodes if node.role == node_pb2.ROLE_INGRESS]


@pytest.mark.timeout(300)
def test_a_script_goes_on_when_its_ingress_has_been_killed(
    start_script: StartScript, cache: Path, tmp_path: Path
) -> None:
    surroundings = Surroundings(tmp_path / "cluster", cache)
    places = [(role, HERE) for role in ("memoryx", "swarmx", "workers", "wafer")]
    log = surroundings.folder / "roles.log"
    with by_hand.cluster_by_hand(HERE, places, surroundings.variables(), log) as management:
        ingress = RestartedIngress(surroundings, management)

        def train(num_kills: int) -> str:
            script = start_script(SCRIPTS / "recovering.py", "--artifacts", "artifacts", management=ingress.address)
            script.wait_for_output("30 ")
            line = "another has taken up the job. The job goes on from step"
            for number in range(1, num_kills + 1):
                ingress.restart()
                wait_for(lambda number=number: script.errors.count(line) == number, explain=lambda: script.errors)
            (script.surroundings.folder / "go").touch()
            assert script.wait(120) == 0, script.errors
            return script.output

        try:
            assert train(num_kills=2) == train(num_kills=0)
        finally:
            ingress.close()
    surroundings.assert_nothing_left()
