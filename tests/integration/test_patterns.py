"""The script of docs/patterns.md: the same numbers on a cluster of two wafers and on the CPU."""

import json
from pathlib import Path

import pytest
from cluster_rig import RunningCluster, StartScript

SCRIPT = Path(__file__).parents[2] / "examples" / "patterns" / "patterns.py"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def test_patterns(start_script: StartScript, cluster: RunningCluster) -> None:
    started = [start_script(SCRIPT, "CPU", management=None), start_script(SCRIPT, "CSX", management=cluster.management)]
    assert [running.wait(200.0) for running in started] == [0, 0], [running.errors for running in started]
    on_cpu, on_cluster = (json.loads(running.output.splitlines()[-1]) for running in started)
    assert on_cpu.keys() == on_cluster.keys()
    for name, figures in on_cpu.items():
        for figure, expected in figures.items():
            assert on_cluster[name][figure] == pytest.approx(expected, rel=1e-5, abs=1e-6), (name, figure)
