"""A script that reaches nothing of the cluster but its ingress."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from cluster_rig import SCRIPTS, Restarted, StartScript, Surroundings, cluster_by_hand, process_at, wait_for
from role_server import RoleServer

from benchmarks.network import HERE
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

TRAIN = Path(__file__).parents[2] / "examples" / "fc_digits" / "train.py"

pytestmark = pytest.mark.cluster

NODES = [(role, HERE) for role in ("memoryx", "swarmx", "workers", "wafer")]
PLACES = [("appliance.ingress", HERE), *NODES]


def test_a_script_trains_and_saves_through_the_ingress(
    start_script: StartScript, cache: Path, tmp_path: Path, role_server: RoleServer
) -> None:
    with cluster_by_hand(Surroundings(tmp_path / "cluster", cache), role_server, PLACES) as management:
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


def test_the_states_of_a_layer_pipelined_job_are_reached_through_the_ingress(
    start_script: StartScript, cache: Path, tmp_path: Path, role_server: RoleServer
) -> None:
    """A wafer keeps them."""
    with cluster_by_hand(Surroundings(tmp_path / "cluster", cache), role_server, PLACES) as management:
        arguments = ("--artifacts", "artifacts", "--pipeline", "--steps", 6)
        outputs = []
        for address in (management, *ingresses(management)):
            script = start_script(SCRIPTS / "recovering_executions.py", *arguments, management=address)
            assert script.wait() == 0, script.errors
            outputs.append(script.output)
    assert outputs[0] == outputs[1]
    assert "end " in outputs[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressCluster:
    """A cluster by hand, with an ingress that may be restarted."""

    surroundings: Surroundings
    management: str
    ingress: Restarted
    address: str  # of the ingress


@contextlib.contextmanager
def cluster_with_ingress(surroundings: Surroundings, server: RoleServer, *words: object) -> Iterator[IngressCluster]:
    """words: options of the ingress. Nothing is left of it."""
    with cluster_by_hand(surroundings, server, NODES) as management:
        ingress = Restarted(surroundings, server, "appliance.ingress", "--management", management, *words)
        try:
            ingress.start("127.0.0.1:0")
            wait_for(lambda: ingresses(management), explain=(surroundings.folder / "restarted.log").read_text)
            (address,) = ingresses(management)
            yield IngressCluster(surroundings=surroundings, management=management, ingress=ingress, address=address)
        finally:
            ingress.end()


def ingresses(management: str) -> list[str]:
    with make_channel(management) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        nodes = stub.ListNodes(management_pb2.ListNodesRequest(), timeout=5.0).nodes
    return [node.address for node in nodes if node.role == node_pb2.ROLE_INGRESS]


@pytest.mark.timeout(300)
def test_a_script_goes_on_when_its_ingress_has_been_killed_or_restarted(
    start_script: StartScript, cache: Path, tmp_path: Path, role_server: RoleServer
) -> None:
    with cluster_with_ingress(Surroundings(tmp_path / "cluster", cache), role_server) as cluster:
        ingress, address = cluster.ingress, cluster.address

        def after(end: Callable[[], None]) -> Callable[[], None]:
            def start_again() -> None:
                end()
                ingress.start(address)

            return start_again

        assert train(start_script, address, after(ingress.kill), after(ingress.end)) == train(start_script, address)


@pytest.mark.timeout(300)
def test_a_script_goes_on_when_its_ingress_and_management_have_been_killed_on_two_hosts(
    start_script: StartScript, cache: Path, tmp_path: Path, role_server: RoleServer
) -> None:
    other = tmp_path / "disk_of_another_host"
    with cluster_with_ingress(Surroundings(tmp_path / "cluster", cache), role_server, "--cache-root", other) as cluster:
        ingress, address = cluster.ingress, cluster.address
        expected = train(start_script, address)
        successor = Restarted(cluster.surroundings, role_server, "appliance")

        def restart_both() -> None:
            first = process_at(cluster.surroundings, cluster.management)
            first.kill()
            ingress.kill()
            wait_for(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
            assert list((other / "jobs").iterdir())
            ingress.start(address)
            successor.start(cluster.management)

        try:
            assert train(start_script, address, restart_both) == expected
        finally:
            successor.end()


def train(start_script: StartScript, ingress: str, *restarts: Callable[[], None]) -> str:
    """What a script prints while all this happens."""
    script = start_script(SCRIPTS / "recovering.py", "--artifacts", "artifacts", management=ingress)
    script.wait_for_output("30 ")
    line = "another has taken over the job. The job has resumed from step"

    def has_resumed(times: int) -> bool:
        return script.errors.count(line) == times

    for number, restart in enumerate(restarts, 1):
        restart()
        wait_for(partial(has_resumed, number), explain=lambda: script.errors)
    (script.surroundings.folder / "go").touch()
    assert script.wait(120) == 0, script.errors
    return script.output
