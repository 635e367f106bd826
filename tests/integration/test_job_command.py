"""The command `waferbox` asks a real cluster for everything about a job, and ends it."""

import json
from pathlib import Path

import pytest
from cluster_rig import SCRIPTS, RunningCluster, StartScript, wait_for
from typer.testing import CliRunner

from waferbox.commands.cli import app

pytestmark = pytest.mark.cluster

NUM_STEPS = 999_999  # which no other job of the cluster has


def test_a_job_is_seen_and_ended(cluster: RunningCluster, start_script: StartScript, tmp_path: Path) -> None:
    def call(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "--management", cluster.management])
        assert result.exit_code == 0, result.output
        return result.stdout

    arguments = ("runs", "--artifacts", tmp_path / "artifacts", "--num-steps", NUM_STEPS)
    script = start_script(SCRIPTS / "faults.py", *arguments, management=cluster.management)
    script.wait_for_output("step 50\n")
    (row,) = (row for row in json.loads(call("get", "jobs", "-o", "json"))["jobs"] if row["num_steps"] == NUM_STEPS)
    name, members = row["job"], [node["member"] for node in row["nodes"]]
    assert (row["phase"], row["num_csx"], row["step"] > 0) == ("JOB_PHASE_RUNNING", 1, True)
    assert sorted(members) == ["memoryx-0", "wafer-0", "worker-0"]
    assert "running" in call("describe", "job", name)
    assert call("get", "nodes").count(name) == len(members)
    wait_for(lambda: all(member in call("top", name) for member in members))
    wait_for(lambda: all(f" {member} " in call("logs", name) for member in members))
    assert call("label", name, "purpose=test") == f"{name} has the labels purpose=test\n"
    assert name in call("get", "jobs", "-l", "purpose=test")
    assert call("set-priority", name, "1") == f"{name} has priority 1 (it was 2)\n"
    assert f"{name} is cancelled (it was running at step " in call("cancel", name)
    assert script.wait() != 0
    wait_for(lambda: "cancelled" in call("get", "jobs", name))
