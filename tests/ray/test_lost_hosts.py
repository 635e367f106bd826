"""A host of a Ray cluster is killed or cut off under a job, which goes on elsewhere with the same results."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
from cluster_rig import RunningCluster, Surroundings

from benchmarks.network import Host

pytest.importorskip("ray", reason="Ray is not installed: pip install 'waferbox[ray]'")

from hosts_rig import MARKS, ON_SITE, SITE, TRAINING, TRAINING_ARGUMENTS, UpOnRay, on_one_host
from ray_rig import ray_cluster

pytestmark = MARKS


def processes_of(host: Host) -> list[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, timeout=20, check=True
    )
    return [int(pid) for pid in listed.stdout.split()]


@contextlib.contextmanager
def killed(victim: Host) -> Iterator[None]:
    for pid in processes_of(victim):
        os.kill(pid, signal.SIGKILL)
    yield


@contextlib.contextmanager
def cut_off(victim: Host) -> Iterator[None]:
    victim.cut_off()
    try:
        yield
    finally:
        victim.reconnect()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, embedded: RunningCluster) -> str:
    return on_one_host(embedded, tmp_path_factory.mktemp("undisturbed"), TRAINING, *TRAINING_ARGUMENTS).output


@pytest.mark.parametrize("fault", [killed, cut_off])
def test_a_host_is_lost_and_the_job_goes_on(
    surroundings: Surroundings,
    three_hosts: list[Host],
    undisturbed: str,
    fault: Callable[[Host], contextlib.AbstractContextManager[None]],
) -> None:
    """All processes of the host are killed, or nobody reaches it."""
    first, spare, victim = three_hosts
    with (
        ray_cluster(surroundings, three_hosts, SITE) as address,
        UpOnRay(surroundings, first, address, fault.__name__, "--insecure", *ON_SITE) as up,
    ):
        script = up.script(TRAINING, *TRAINING_ARGUMENTS)
        script.wait_for_output("20 ")
        assert up.hosts_of_wafers() == {spare.address, victim.address}
        lost = processes_of(victim)
        with fault(victim):
            (script.surroundings.folder / "go").touch()
            assert script.wait(300) == 0, f"{script.errors}\n{up.log()}"
            assert up.hosts_of_wafers() == {spare.address}
    assert script.output == undisturbed
    for folder in surroundings.temporary.glob("waferbox-ray-*"):
        assert int(folder.name.split("-")[2]) in lost, "of a host that was lost: the next actor there would sweep"
        shutil.rmtree(folder)
