"""What dies in a cluster that was started on this machine is started again."""

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from cluster_rig import SCRIPTS, StartScript, Surroundings, wait_for
from role_server import RoleServer
from up_rig import up, waferbox

from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2

FAULTS = SCRIPTS / "faults.py"
FOR_EVER = 1_000_000  # steps

pytestmark = pytest.mark.cluster


@pytest.fixture
def surroundings(tmp_path: Path, cache: Path) -> Iterator[Surroundings]:
    surroundings = Surroundings(tmp_path / "cluster", cache)
    yield surroundings
    surroundings.assert_nothing_left()


def nodes(management: str, role: "node_pb2.Role.ValueType | None" = None) -> list[management_pb2.NodeInfo]:
    with make_channel(management) as channel:
        listed = management_pb2_grpc.ManagementStub(channel).ListNodes(management_pb2.ListNodesRequest(), timeout=10.0)
    return [node for node in listed.nodes if role in (None, node.role)]


def test_a_wafer_that_is_killed_is_replaced_for_the_next_job(
    start_script: StartScript, surroundings: Surroundings, role_server: RoleServer
) -> None:
    with up(surroundings, "--wafers", "2", server=role_server) as (cluster, management):
        victim, other = nodes(management, node_pb2.ROLE_WAFER)
        psutil.Process(victim.process_id).kill()
        wait_for(lambda: victim.address not in [node.address for node in nodes(management, node_pb2.ROLE_WAFER)])
        script = start_script(FAULTS, "runs", "--artifacts", "artifacts", "--num-csx", 2, management=management)
        assert script.wait() == 0, script.errors
        there = {node.process_id for node in nodes(management, node_pb2.ROLE_WAFER)}
        assert other.process_id in there
        (new,) = there - {other.process_id}
        assert waferbox(surroundings, "down", server=role_server).returncode == 0
        assert cluster.wait(60) == 0
        assert cluster.stderr is not None
        told = cluster.stderr.read()
    assert f"wafer (pid {victim.process_id}) ended with status -9; started again as pid {new}\n" in told


def management_process(surroundings: Surroundings) -> psutil.Process:
    (found,) = [p for p in surroundings.processes() if "appliance" in p.cmdline() and "--listen" in p.cmdline()]
    return found


def jobs(management: str) -> list[management_pb2.JobInfo]:
    """None as well where management dies meanwhile."""
    with make_channel(management) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        try:
            return list(stub.ListJobs(management_pb2.ListJobsRequest(), timeout=30.0, wait_for_ready=True).jobs)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return []


@pytest.mark.timeout(300)  # three jobs, one after the other
def test_a_job_runs_on_while_management_dies_and_comes_back(
    start_script: StartScript, surroundings: Surroundings, role_server: RoleServer
) -> None:
    arguments = (FAULTS, "runs", "--artifacts", "artifacts", "--num-csx", 2, "--losses", "--num-steps", 800)
    with up(surroundings, "--wafers", "2", "--page", "--metrics", server=role_server) as (cluster, management):
        undisturbed = start_script(*arguments, management=management)
        assert undisturbed.wait(120) == 0, undisturbed.errors
        script = start_script(*arguments, "--pause", 0.02, management=management)
        script.wait_for_output("step 100:")
        first = management_process(surroundings)
        before = {node.address: node.member for node in nodes(management)}
        first.kill()
        wait_for(lambda: [job.step for job in jobs(management)] != [])
        assert script.process.poll() is None
        second = management_process(surroundings)
        assert second.pid != first.pid
        wait_for(lambda: {node.address: node.member for node in nodes(management)} == before)
        assert script.wait(120) == 0, script.errors
        assert script.output == undisturbed.output
        assert "Error" not in script.errors
        # It is as good as the one before.
        again = start_script(FAULTS, "runs", "--artifacts", "artifacts", "--num-csx", 2, management=management)
        assert again.wait() == 0, again.errors
        shown = waferbox(surroundings, "status", "--management", management, server=role_server)
        assert shown.returncode == 0
        assert waferbox(surroundings, "down", server=role_server).returncode == 0
        assert cluster.wait(60) == 0
        assert cluster.stderr is not None
        assert f"appliance (pid {first.pid}) ended with status -9; started again as" in cluster.stderr.read()


@pytest.mark.parametrize("way", ["kill -9", "Ctrl-C"])
def test_nothing_is_left_of_a_cluster_whose_management_was_started_again(
    start_script: StartScript, surroundings: Surroundings, role_server: RoleServer, way: str
) -> None:
    with up(surroundings, server=role_server) as (cluster, management):
        script = start_script(
            FAULTS, "runs", "--artifacts", "artifacts", "--num-steps", 1_000_000, management=management
        )
        script.wait_for_output("step 50\n")
        management_process(surroundings).kill()
        wait_for(lambda: jobs(management))
        if way == "kill -9":
            cluster.kill()
        else:
            cluster.send_signal(signal.SIGINT)
            assert cluster.wait(60) == 0
        assert script.wait() == 1
        assert "cstorch.errors." in script.errors
