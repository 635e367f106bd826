"""Whatever dies, the script gets what it gets in a run in which nothing dies: outputs, weights and checkpoints."""

import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cluster_rig import PATIENCE_SECONDS, SCRIPTS, RunningCluster, RunningScript, StartCluster, StartScript, wait_for

from waferbox import roles
from wsc.v1 import management_pb2

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SCRIPT = SCRIPTS / "recovering.py"
ROLES = {role.name: role.number for role in roles.LEASED}


def run(
    start_script: StartScript, cluster: RunningCluster, harm: Callable[[RunningScript], None], *options: object
) -> tuple[str, str]:
    """What the script prints, and says; harm is done to the cluster when it stops."""
    script = start_script(SCRIPT, "--artifacts", "artifacts", *options, management=cluster.management)
    script.wait_for_output("30 ")
    harm(script)
    (script.surroundings.folder / "go").touch()
    assert script.wait(120) == 0, script.errors
    return script.output, script.errors


def nothing(script: RunningScript) -> None:
    pass


def assert_no_copies(recovery: Path) -> None:
    """There are recovery points, and as all lie in one folder each is there but once."""
    folders = {folder.name for folder in recovery.glob("*/*")}
    assert folders >= {"memoryx-0", "memoryx-1"}
    assert not [name for name in folders if name.endswith("-copy")]


def kill(cluster: RunningCluster, role: str) -> Callable[[RunningScript], None]:
    """Kill a node of the job, and wait until the cluster has another."""

    def harm(script: RunningScript) -> None:
        victim = next(node for node in cluster.nodes(ROLES[role]) if node.job)
        cluster.process_at(victim.address).kill()
        wait_for(lambda: victim.address not in [node.address for node in cluster.nodes()])

    return harm


@pytest.mark.parametrize("wafers", [1, 2])
def test_the_results_are_those_of_a_run_in_which_nothing_dies(
    start_script: StartScript, tmp_path: Path, cache: Path, start_cluster: StartCluster, wafers: int
) -> None:
    size = ("--num-csx", wafers, "--shards", 2)
    with start_cluster(tmp_path / "cluster", wafers=wafers, memoryx=2, workers=wafers) as cluster:
        expected, _ = run(start_script, cluster, lambda script: assert_no_copies(cache / "recovery"), *size)
        for role in ROLES if wafers > 1 else ("wafer", "memoryx", "worker"):
            output, errors = run(start_script, cluster, kill(cluster, role), *size)
            assert output == expected, role
            assert f"{role}-" in errors
            assert "The job has resumed from step" in errors


def test_halves_that_are_rounded_again_are_the_same(
    start_script: StartScript, tmp_path: Path, start_cluster: StartCluster
) -> None:
    """Gradients that travel in half, of a wafer that dies and of a node that adds them."""
    size = ("--num-csx", 2, "--half-gradients")
    with start_cluster(tmp_path / "cluster", wafers=2, memoryx=1, swarmx=1, workers=2) as cluster:
        expected, errors = run(start_script, cluster, nothing, *size)
        assert "gradients travel in it" in errors
        for role in ("wafer", "swarmx"):
            output, errors = run(start_script, cluster, kill(cluster, role), *size)
            assert output == expected, role
            assert "The job has resumed from step" in errors


def kill_coordinator(
    cluster: RunningCluster, number: signal.Signals = signal.SIGKILL
) -> Callable[[RunningScript], None]:
    """Kill the coordinator of the job, and wait until management has another."""

    def harm(script: RunningScript) -> None:
        before = next(job.coordinator for job in cluster.jobs() if not job.ended)
        cluster.process_at(before).send_signal(number)
        wait_for(
            lambda: any(job.coordinator not in ("", before) for job in cluster.jobs() if not job.ended),
            explain=lambda: f"{before} was killed; {cluster.jobs()}\nThe script: {script.errors}",
        )

    return harm


def test_the_results_are_those_of_a_run_in_which_the_coordinator_does_not_die(
    start_script: StartScript, tmp_path: Path, cache: Path, start_cluster: StartCluster
) -> None:
    with start_cluster(tmp_path / "cluster", wafers=1, memoryx=1, workers=1) as cluster:
        expected, _ = run(start_script, cluster, nothing)
        cases = [((), signal.SIGKILL), ((), signal.SIGTERM), ((), signal.SIGINT), (("--restartable",), signal.SIGKILL)]
        for options, number in cases:
            output, errors = run(start_script, cluster, kill_coordinator(cluster, number), *options)
            assert output == expected, (options, number)
            assert "another has taken over the job" in errors
            assert "The job has resumed from step" in errors
        records = [cache / "jobs" / job.job for job in cluster.jobs()]
        wait_for(lambda: not any(record.exists() for record in records))


def test_the_coordinator_may_die_after_management_has(
    start_script: StartScript, tmp_path: Path, start_cluster: StartCluster
) -> None:
    with start_cluster(tmp_path / "cluster", wafers=1, memoryx=1, workers=1) as cluster:
        expected, _ = run(start_script, cluster, nothing)

        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):

            def kill_both(script: RunningScript, number: signal.Signals = number) -> None:
                management = cluster.process_at(cluster.management)
                management.send_signal(number)
                management.wait(PATIENCE_SECONDS)
                wait_for(lambda: any(not job.ended for job in known_jobs(cluster)))
                kill_coordinator(cluster, number)(script)

            output, errors = run(start_script, cluster, kill_both)
            assert output == expected, number
            assert "another has taken over the job" in errors


def known_jobs(cluster: RunningCluster) -> list[management_pb2.JobInfo]:
    """Those of the management service, once there is one again."""
    try:
        return cluster.jobs()
    except grpc.RpcError:
        return []
