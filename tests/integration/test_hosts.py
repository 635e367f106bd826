"""Roles on several hosts, with links of 1 Gbit/s between them, train as they do on one host: the same numbers."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import parity
import pytest
from cluster_rig import SCRIPTS, RunningCluster, StartScript, Surroundings, cluster_by_hand, hosts_or_skip
from role_server import RoleServer

from benchmarks.network import Host

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
