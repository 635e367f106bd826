"""The fork server dies, or is suspended: the cluster has another, jobs are told why, and a script is not held up."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cluster_rig import SCRIPTS, RunningScript, StartScript, Surroundings, wait_for
from role_server import RoleServer
from up_rig import up, waferbox

from waferbox.cluster.supervised_process import MAX_EARLY_EXITS
from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc

FAULTS = SCRIPTS / "faults.py"
END_SECONDS = 5.0  # what is promised of a cluster that is a script's own
FOR_EVER = 1_000_000  # steps

pytestmark = pytest.mark.cluster


def fork_server(surroundings: Surroundings) -> psutil.Process:
    (found,) = fork_servers(surroundings)
    return found


def fork_servers(surroundings: Surroundings) -> list[psutil.Process]:
    return [process for process in surroundings.processes() if _is_fork_server(process)]


def _is_fork_server(process: psutil.Process) -> bool:
    """What the fork server forks has the same command line."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        if "waferbox.launch.fork_server" in process.cmdline() and parent is not None:
            return parent.pid != 1 and "waferbox.launch.fork_server" not in parent.cmdline()
    return False


def start_training(start_script: StartScript, management: str | None) -> RunningScript:
    arguments = ("runs", "--artifacts", "artifacts", "--num-steps", FOR_EVER)
    script = start_script(FAULTS, *arguments, management=management, WAFERBOX_MAX_NUM_RESTARTS="0")
    script.wait_for_output("step 50\n")
    return script


def test_a_script_is_told_that_the_fork_server_of_its_own_cluster_was_killed(start_script: StartScript) -> None:
    script = start_training(start_script, None)
    victim = fork_server(script.surroundings)
    victim.kill()
    begin = time.monotonic()
    assert script.wait() == 1
    assert time.monotonic() - begin < 2 * END_SECONDS  # with the end of the script
    error = script.errors.rpartition("cstorch.errors.")[2]
    assert error.startswith("NodeLostError: the coordinator of job-")
    assert f"the fork server (pid {victim.pid}), which had started it, died" in error


@pytest.fixture
def surroundings(tmp_path: Path, cache: Path) -> Surroundings:
    return Surroundings(tmp_path / "cluster", cache)


@pytest.mark.parametrize("trains", [False, True], ids=["idle", "with a job"])
def test_a_cluster_whose_fork_server_was_killed_is_whole_again_soon(
    start_script: StartScript, surroundings: Surroundings, role_server: RoleServer, *, trains: bool
) -> None:
    with up(surroundings) as (cluster, management):
        script = start_training(start_script, management) if trains else None
        victim = fork_server(surroundings)
        dead = set(node_pids(management))
        victim.kill()
        wait_for(lambda: len(node_pids(management)) == len(dead) and not dead & set(node_pids(management)))
        if script is not None:
            assert script.wait() == 1
            told = script.errors.rpartition("cstorch.errors.NodeLostError")[2]
            assert f"the fork server (pid {victim.pid}), which had started it, died" in told
        again = start_script(FAULTS, "runs", "--artifacts", "artifacts", management=management)
        assert again.wait() == 0, again.errors
        assert fork_server(surroundings).pid != victim.pid
        assert waferbox(surroundings, "down", server=role_server).returncode == 0
        assert cluster.wait(60) == 0
        assert cluster.stderr is not None
        told = cluster.stderr.read()
    assert f"the fork server (pid {victim.pid}) was killed by SIGKILL, and all nodes with it" in told
    surroundings.assert_nothing_left()


def node_pids(management: str) -> list[int]:
    with make_channel(management) as channel:
        listed = management_pb2_grpc.ManagementStub(channel).ListNodes(management_pb2.ListNodesRequest(), timeout=30.0)
    return [node.process_id for node in listed.nodes]


def test_a_cluster_in_the_background_whose_fork_server_does_not_stay_leaves_word_of_its_end(
    surroundings: Surroundings, role_server: RoleServer
) -> None:
    started = waferbox(surroundings, "up", "--background")
    assert started.returncode == 0, started.stderr
    victims: list[int] = []
    while surroundings.processes():
        for victim in fork_servers(surroundings):
            if victim.pid not in victims:
                victims.append(victim.pid)
                victim.kill()
    assert len(victims) >= MAX_EARLY_EXITS
    cause = "was killed by SIGKILL, 5 times in a row"
    assert cause in waferbox(surroundings, "status", server=role_server).stderr
    # Until it is cleared away, or nobody is told once another has been started.
    assert waferbox(surroundings, "up", "--background").returncode == 0
    assert waferbox(surroundings, "down", server=role_server).returncode == 0
    assert cause not in waferbox(surroundings, "status", server=role_server).stderr
    surroundings.assert_nothing_left()


def test_a_cluster_starts_although_its_fork_server_dies_meanwhile(surroundings: Surroundings) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "waferbox.cluster.embedded"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=surroundings.variables(),
    ) as cluster:
        wait_for(lambda: any("waferbox.launch.fork_server" in p.cmdline() for p in surroundings.processes()))
        victim = fork_server(surroundings)
        victim.kill()
        assert cluster.stdin is not None
        assert cluster.stdout is not None
        assert cluster.stderr is not None
        assert json.loads(cluster.stdout.readline())["management"]
        cluster.stdin.close()
        assert cluster.wait(60) == 0
        errors = cluster.stderr.read()
    assert f"the fork server (pid {victim.pid}) was killed by SIGKILL, and all nodes with it" in errors
    surroundings.assert_nothing_left()


def test_a_script_ends_in_good_order_while_the_fork_server_is_suspended(start_script: StartScript) -> None:
    script = start_script(FAULTS, "runs", "--artifacts", "artifacts", "--num-steps", 300, management=None)
    script.wait_for_output("step 50\n")
    victim = fork_server(script.surroundings)
    victim.send_signal(signal.SIGSTOP)
    try:
        assert script.wait() == 0, script.errors
    finally:
        if victim.is_running():
            victim.send_signal(signal.SIGCONT)
    assert script.output.endswith("step 300\ndone\n")
    assert "Error" not in script.errors
