"""A node that dies while the kernel kills processes for want of memory: the cause says so."""

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_in_process import Client, ClusterInProcess

from appliance.coordinator.process_host import ProcessHost
from waferbox.host import oom_kills as counted
from waferbox.host.oom_kills import OomWatch, oom_kills
from wsc.v1 import node_pb2


@pytest.mark.parametrize(("kills", "is_named"), [(1, True), (0, False)])
def test_the_cause_of_a_death_names_the_killer(
    cluster: ClusterInProcess,
    client: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
    *,
    is_named: bool,
) -> None:
    count = [7]
    monkeypatch.setattr(ProcessHost, "oom_kills", staticmethod(lambda: count[0]))
    cluster.add(memoryx=1, swarmx=1, wafer=1, workers=1)
    one = client(max_num_restarts=0)
    one.compile()
    one.begin(40)
    one.start()
    count[0] += kills
    cluster.kill(next(index for index, (module, _) in enumerate(cluster.nodes) if module == "memoryx"))
    failure = one.failure()
    assert failure.kind == node_pb2.Failure.KIND_NODE
    assert "memoryx-0 (pid " in failure.message
    assert ("out-of-memory killer has just killed a process of this host" in failure.message) is is_named
    assert ("--state-dir" in failure.message) is is_named


def test_only_the_kills_of_the_last_seconds_count() -> None:
    count = [7]
    watch = OomWatch(lambda: count[0])
    assert not watch.has_killed()
    count[0] += 1
    found = []
    for _ in range(4):
        found.append(watch.has_killed())
        watch.tick()
    assert found == [True, True, True, False]


@pytest.mark.parametrize(("text", "number"), [("pgfault 9\noom_kill 16\nother 1\n", 16), ("pgfault 9\n", 0)])
def test_the_kernel_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, number: int) -> None:
    monkeypatch.setattr(counted, "_STATISTICS", tmp_path / "vmstat")
    assert oom_kills() == 0
    (tmp_path / "vmstat").write_text(text)
    assert oom_kills() == number
