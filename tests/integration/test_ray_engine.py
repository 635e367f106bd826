"""A cluster on Ray, on one host: the losses are those of the embedded cluster, though a wafer is killed meanwhile."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_rig import SCRIPTS, RunningCluster, StartScript, Surroundings, wait_for
from up_rig import up, waferbox

from waferbox.rpc.server import make_channel
from wsc.v1 import management_pb2, management_pb2_grpc

pytest.importorskip("ray", reason="Ray is not installed: pip install 'waferbox[ray]'")

from ray_rig import VARIABLES, ray_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

STEPS = ("--artifacts", "artifacts", "--steps", 60, "--stop", 0, "--pause")


@pytest.fixture
def surroundings(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Surroundings]:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    made = Surroundings(tmp_path / "ray", cache)
    yield made
    made.assert_nothing_left()


def test_a_killed_wafer_is_started_again_by_ray_and_the_losses_are_the_embedded_ones(
    surroundings: Surroundings, cluster: RunningCluster, start_script: StartScript
) -> None:
    embedded = start_script(SCRIPTS / "recovering.py", *STEPS, 0, management=cluster.management)
    assert embedded.wait() == 0, embedded.errors
    with ray_cluster(surroundings) as address:
        with up(surroundings, "--engine", "ray", "--address", address) as (process, management):
            script = start_script(SCRIPTS / "recovering.py", *STEPS, 0.05, management=management)
            script.wait_for_output("20 ")
            victim = process_of(management, "wafer-0")
            os.kill(victim, signal.SIGKILL)
            assert script.wait() == 0, script.errors
            for line in process.stderr or ():  # the launcher may be behind the script
                if (
                    f"wafer (pid {victim}) ended" in line and "started" in line
                ):  # by Ray, or after an early end by itself
                    break
            else:
                pytest.fail("the launcher has not logged that the wafer was started again")
            assert waferbox(surroundings, "down").returncode == 0
            assert isinstance(process, subprocess.Popen)
            process.communicate(timeout=30)
        wait_for(lambda: roles(surroundings) == [], explain=lambda: str(roles(surroundings)))
    assert script.output == embedded.output
    assert "The job has resumed from step" in script.errors


def roles(surroundings: Surroundings) -> list[list[str]]:
    """The command lines of role processes that live."""
    return [line for process in surroundings.processes() if "waferbox.launch.process" in (line := process.cmdline())]


def process_of(management: str, member: str) -> int:
    """Of a job that is under way."""
    with make_channel(management) as channel:
        stub = management_pb2_grpc.ManagementStub(channel)
        nodes = stub.ListNodes(management_pb2.ListNodesRequest(), timeout=10.0).nodes
    return next(node.process_id for node in nodes if node.member == member)
