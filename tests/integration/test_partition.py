"""Hosts that cannot reach each other for 10 s in the middle of training: the job goes on, with the same results.

The script's own host is one of them; whether the script notices depends on when it has heard of its coordinator last.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cluster_rig import SCRIPTS, RunningScript, StartScript, Surroundings, cluster_by_hand, hosts_or_skip
from role_server import RoleServer

from benchmarks.network import Host
from waferbox.security.tokens import Kind, own_clusters_token

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SCRIPT = SCRIPTS / "recovering.py"
SECONDS = 10.0  # which is what is promised; longer than a lease lasts, and than a silent peer is waited for


@pytest.fixture
def three_hosts() -> Iterator[list[Host]]:
    with hosts_or_skip(3, "1gbit") as made:
        yield made


def cut_off(victims: Sequence[Host]) -> None:
    """From everybody, and so from each other."""
    for host in victims:
        host.cut_off()
    time.sleep(SECONDS)
    for host in victims:
        host.reconnect()


def test_the_results_are_those_of_a_run_in_which_all_hosts_reach_each_other(
    three_hosts: list[Host], start_script: StartScript, cache: Path, tmp_path: Path, role_server: RoleServer
) -> None:
    first, states_host, wafers_host = three_hosts
    places = [("memoryx", states_host), ("swarmx", states_host), ("wafer", wafers_host), ("workers", wafers_host)]
    with cluster_by_hand(Surroundings(tmp_path / "cluster", cache), role_server, places, host=first) as management:

        def start(pause: float) -> RunningScript:
            arguments = ("--artifacts", "artifacts", "--steps", 60, "--stop", 0, "--pause", pause)
            return start_script(
                SCRIPT,
                *arguments,
                management=management,
                prefix=wafers_host.command(),
                WAFERBOX_TOKEN=own_clusters_token(Kind.USER),
            )

        undisturbed = start(pause=0.0)
        assert undisturbed.wait(120) == 0, undisturbed.errors
        script = start(pause=0.05)
        script.wait_for_output("20 ")
        cut_off([states_host, wafers_host])
        assert script.wait(120) == 0, script.errors
    assert script.output == undisturbed.output
    assert "The job has resumed from step" in script.errors
