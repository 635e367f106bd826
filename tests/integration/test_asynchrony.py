"""The cluster runs ahead of the script's closures, as far as it may, and what they see is in order."""

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_rig import SCRIPTS, RunningCluster, RunningScript, StartScript, Surroundings, wait_for
from script_server import ScriptServer

BOUND = 20
STEPS = 80
SLEEP_SECONDS = 2.0
# Batches that a worker makes before the wafer takes them: the slots of its ring, the one that it holds, the one under
# way; and one step, whose outputs wait for the bound when all before it are done.
AHEAD_OF_THE_WAFER = 8

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def seen(
    cluster: RunningCluster, tmp_path_factory: pytest.TempPathFactory, cache: Path, script_server: ScriptServer
) -> dict[str, Any]:
    """What the closures saw, and when, and when the batches were made."""
    surroundings = Surroundings(tmp_path_factory.mktemp("asynchrony") / "script", cache)
    result = surroundings.folder / "result.json"
    arguments = [result, "--num-steps", STEPS, "--sleep", SLEEP_SECONDS]
    script = RunningScript(
        surroundings,
        SCRIPTS / "asynchrony.py",
        arguments,
        cluster.management,
        {"WAFERBOX_RUN_AHEAD_STEPS": str(BOUND)},
        server=script_server,
    )
    assert script.wait() == 0, script.errors
    surroundings.assert_nothing_left()
    return dict(json.loads(result.read_text()))


def test_closures_run_in_order_and_see_the_value_of_their_step(seen: dict[str, Any]) -> None:
    assert [count for count, _, _ in seen["closures"]] == list(range(1, STEPS + 1))


def test_a_closure_sees_the_last_value_that_was_set(seen: dict[str, Any]) -> None:
    assert [doubled for _, doubled, _ in seen["closures"]] == [2 * step for step in range(1, STEPS + 1)]


def test_a_closure_that_sleeps_holds_the_cluster_up_at_the_bound_only(seen: dict[str, Any]) -> None:
    begin, end = seen["sleep"]
    made = seen["batches"]
    assert len(made) >= STEPS
    while_it_slept = sum(when < end for when in made)
    assert 1 + BOUND <= while_it_slept <= 1 + BOUND + AHEAD_OF_THE_WAFER
    assert made[BOUND] < begin + SLEEP_SECONDS / 2
    assert made[while_it_slept] - end < SLEEP_SECONDS / 2  # and goes on when the closure has come back


def test_management_sees_the_job_get_on(cluster: RunningCluster, start_script: StartScript) -> None:
    arguments = ["runs", "--num-steps", 1_000_000, "--artifacts", "artifacts"]
    script = start_script(SCRIPTS / "faults.py", *arguments, management=cluster.management)
    wait_for(lambda: any(job.step >= 20 and job.num_steps == 1_000_000 for job in cluster.jobs()))
    script.interrupt()
    script.wait()
