"""Roles on several hosts, with links of 1 Gbit/s between them, train as they do on one host: the same numbers."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import parity
import pytest
from cluster_rig import (
    SCRIPTS,
    RunningCluster,
    RunningScript,
    StartScript,
    Surroundings,
    cluster_by_hand,
    hosts_or_skip,
)
from forking_server import ForkedProcess
from role_server import RoleServer

from benchmarks.network import Host
from waferbox.security.tokens import Kind, own_clusters_token

pytestmark = pytest.mark.cluster


@pytest.fixture
def four_hosts() -> Iterator[list[Host]]:
    with hosts_or_skip(4, "1gbit") as made:
        yield made


@pytest.mark.timeout(300)  # on a busy machine
def test_two_wafers_on_two_hosts_train_as_on_one_host(
    four_hosts: list[Host],
    start_script: StartScript,
    cluster: RunningCluster,
    cache: Path,
    role_server: RoleServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, *wafer_hosts = four_hosts
    places = [("memoryx", second), ("swarmx", second)]
    places += [(role, host) for host in wafer_hosts for role in ("wafer", "workers")]
    result = tmp_path / "result.json"
    with cluster_by_hand(Surroundings(tmp_path / "cluster", cache), role_server, places, host=first) as management:
        arguments = ["CSX", result, "--num-csx", 2, "--num-steps", 12, "--lr", 0.01]
        script = start_script(SCRIPTS / "parity.py", *arguments, management=management, prefix=first.command())
        assert script.wait() == 0, script.errors
        weights = 4 * sum(parameter.numel() for parameter in parity.Network().parameters())
        for host in wafer_hosts:
            assert host.sent_bytes() > 12 * weights  # its gradients have left it
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    options = argparse.Namespace(
        mode="CSX",
        result=tmp_path / "embedded",
        optimizer="adamw",
        reduction="mean",
        num_csx=2,
        shards=1,
        workers=1,
        batch_size=24,
        num_steps=12,
        max_norm=1.0,
        lr=0.01,
    )
    assert json.loads(result.read_text()) == parity.run_cstorch(options)


@pytest.mark.timeout(400)
def test_a_shard_on_each_host_has_a_tree_of_its_own_and_nodes_of_it_are_replaced(
    four_hosts: list[Host], start_script: StartScript, cache: Path, role_server: RoleServer, tmp_path: Path
) -> None:
    first, second, *_ = four_hosts
    places = [(role, host) for host in four_hosts for role in ("memoryx", "swarmx", "wafer", "workers")]
    spare = ("swarmx", first)
    started: list[tuple[str, Host, ForkedProcess]] = []
    surroundings = Surroundings(tmp_path / "cluster", cache)
    sizes = ("--artifacts", "artifacts", "--steps", 60, "--stop", 0, "--num-csx", 4, "--shards", 4)
    with cluster_by_hand(surroundings, role_server, [*places, spare], host=first, started=started) as management:

        def start(pause: float) -> RunningScript:
            return start_script(
                SCRIPTS / "recovering.py",
                *(*sizes, "--pause", pause),
                management=management,
                prefix=first.command(),
                WAFERBOX_TOKEN=own_clusters_token(Kind.USER),
            )

        undisturbed = start(pause=0.0)
        assert undisturbed.wait(120) == 0, undisturbed.errors
        script = start(pause=0.05)
        script.wait_for_output("20 ")
        # The root of one tree, and in the chains of the others; the spare on another host takes its place in all.
        next(process for module, host, process in started if module == "swarmx" and host is second).kill()
        assert script.wait(120) == 0, script.errors
    assert script.output == undisturbed.output
    assert "The job has resumed from step" in script.errors
    # Four wafers on one host have one tree, whose sums are in another order.
    on_one_host = start_script(SCRIPTS / "recovering.py", *sizes, management="embedded")
    assert on_one_host.wait(120) == 0, on_one_host.errors
    assert losses(on_one_host.output) == pytest.approx(losses(undisturbed.output), rel=1e-4)
    assert len(losses(undisturbed.output)) == 60


def losses(output: str) -> list[float]:
    """The losses that a script has printed, step by step."""
    words = [line.split() for line in output.splitlines()]
    return [float.fromhex(value) for name, value in words if name.isdigit()]
