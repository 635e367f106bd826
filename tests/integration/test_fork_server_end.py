"""The fork server dies, or is suspended: a cluster without it ends and says why, and a script is not held up."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cluster_rig import SCRIPTS, RunningScript, StartScript, Surroundings, wait_for
from up_rig import up, waferbox

FAULTS = SCRIPTS / "faults.py"
END_SECONDS = 5.0  # what is promised
FOR_EVER = 1_000_000  # steps

pytestmark = pytest.mark.cluster


def fork_server(surroundings: Surroundings) -> psutil.Process:
    (found,) = [p for p in surroundings.processes() if "nodes.launch.fork_server" in p.cmdline() and _is_first(p)]
    return found


def _is_first(process: psutil.Process) -> bool:
    """What the fork server forks has the same command line."""
    parent = process.parent()
    return parent is not None and "nodes.launch.fork_server" not in parent.cmdline()


def start_training(start_script: StartScript, management: str | None) -> RunningScript:
    script = start_script(FAULTS, "runs", "--artifacts", "artifacts", "--num-steps", FOR_EVER, management=management)
    script.wait_for_output("step 50\n")
    return script


def test_a_script_is_told_that_the_fork_server_of_its_own_cluster_was_killed(start_script: StartScript) -> None:
    script = start_training(start_script, None)
    victim = fork_server(script.surroundings)
    victim.kill()
    begin = time.monotonic()
    assert script.wait() == 1
    assert time.monotonic() - begin < 2 * END_SECONDS  # with the end of the script
    error = script.errors.rpartition("cstorch.errors.")[2]
    assert error.startswith("NodeLostError: the coordinator of job-")
    assert f"the fork server (pid {victim.pid}) was killed by signal 9" in error


@pytest.fixture
def surroundings(tmp_path: Path, cache: Path) -> Surroundings:
    return Surroundings(tmp_path / "cluster", cache)


@pytest.mark.parametrize("trains", [False, True], ids=["idle", "with a job"])
def test_a_cluster_whose_fork_server_was_killed_ends_and_says_why(
    start_script: StartScript, surroundings: Surroundings, *, trains: bool
) -> None:
    with up(surroundings) as (cluster, management):
        script = start_training(start_script, management) if trains else None
        victim = fork_server(surroundings)
        cause = f"the fork server (pid {victim.pid}) was killed by signal 9"
        begin = time.monotonic()
        victim.kill()
        assert cluster.wait(60) == 1
        assert time.monotonic() - begin < END_SECONDS
        assert cluster.stderr is not None
        assert cause in cluster.stderr.read()
    if script is not None:
        assert script.wait() == 1
        told = script.errors.rpartition("cstorch.errors.NodeLostError")[2]
        # Management ends a moment after the coordinator: the script may be too late to hear the cause from it.
        assert cause in told or "`waferbox status` says why" in told
    shown = waferbox(surroundings, "status")
    assert (shown.returncode, cause in shown.stderr) == (1, True)
    named = waferbox(surroundings, "status", "--management", management)
    assert (named.returncode, cause in named.stderr) == (1, True)
    # Until it is cleared away.
    assert cause in waferbox(surroundings, "down").stderr
    assert cause not in waferbox(surroundings, "status").stderr
    surroundings.assert_nothing_left()


def test_a_cluster_in_the_background_leaves_word_of_its_end(surroundings: Surroundings) -> None:
    started = waferbox(surroundings, "up", "--background")
    assert started.returncode == 0, started.stderr
    victim = fork_server(surroundings)
    victim.kill()
    cause = f"the fork server (pid {victim.pid}) was killed by signal 9"
    wait_for(lambda: not surroundings.processes(), 2 * END_SECONDS)
    assert cause in waferbox(surroundings, "status").stderr
    # Nobody is told once another has been started.
    assert waferbox(surroundings, "up", "--background").returncode == 0
    assert waferbox(surroundings, "down").returncode == 0
    assert cause not in waferbox(surroundings, "status").stderr
    surroundings.assert_nothing_left()


def test_a_fork_server_that_dies_while_the_cluster_starts_is_named(surroundings: Surroundings) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "waferbox.cluster.embedded"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=surroundings.variables(),
    ) as cluster:
        wait_for(lambda: any("nodes.launch.fork_server" in p.cmdline() for p in surroundings.processes()))
        victim = fork_server(surroundings)
        victim.kill()
        assert cluster.wait(60) == 1
        assert cluster.stdout is not None
        assert cluster.stderr is not None
        assert cluster.stdout.read() == ""
        errors = cluster.stderr.read()
    assert f"the fork server (pid {victim.pid}) was killed by signal 9" in errors
    surroundings.assert_nothing_left()


def test_a_script_ends_in_good_order_while_the_fork_server_is_suspended(start_script: StartScript) -> None:
    script = start_script(FAULTS, "runs", "--artifacts", "artifacts", "--num-steps", 300, management=None)
    script.wait_for_output("step 50\n")
    victim = fork_server(script.surroundings)
    victim.send_signal(signal.SIGSTOP)
    try:
        assert script.wait() == 0, script.errors
    finally:
        if victim.is_running():
            victim.send_signal(signal.SIGCONT)
    assert script.output.endswith("step 300\ndone\n")
    assert "Error" not in script.errors
