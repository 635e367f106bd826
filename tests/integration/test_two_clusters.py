"""Clusters on one machine at the same time: each has its own processes, all share a cache, none minds the others."""

from pathlib import Path

import pytest
from cluster_rig import SCRIPTS, RunningCluster, StartScript


@pytest.mark.cluster
def test_two_embedded_clusters_run_at_once_beside_a_third(
    cluster: RunningCluster, start_script: StartScript, tmp_path: Path
) -> None:
    jobs = {job.job for job in cluster.jobs()}
    # Both find nothing in the cache, and make the same things at the same time.
    arguments = ("runs", "--artifacts", "artifacts", "--batch-size", 6)
    variables = {"WAFERBOX_CACHE": str(tmp_path / "cache")}
    scripts = [start_script(SCRIPTS / "faults.py", *arguments, management=None, **variables) for _ in range(2)]
    for script in scripts:
        assert script.wait() == 0, script.errors
        assert script.output.endswith("step 20\ndone\n")
        assert "WARNING" not in script.errors
    assert len(list((tmp_path / "cache").glob("*/*.plan"))) == 1
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    assert {job.job for job in cluster.jobs()} <= jobs
