"""Whatever goes wrong, the user reads what it was, soon, and nothing hangs or stays behind."""

import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster_rig import SCRIPTS, RunningCluster, RunningScript, StartCluster, StartScript, Surroundings, wait_for
from role_server import RoleServer

from wsc.v1 import management_pb2, node_pb2

FAULTS = SCRIPTS / "faults.py"
FOR_EVER = 1_000_000  # steps
ENDS = {"WAFERBOX_MAX_NUM_RESTARTS": "0"}  # a job ends with the first death, instead of going on
FAILURE_SECONDS = 10.0
# Of our own making, and of no use to somebody whose input or model is at fault.
NOISE = re.compile(r"grpc|Rendezvous|StatusCode|Stream removed|The above exception|During handling", re.IGNORECASE)

pytestmark = pytest.mark.cluster


def message_of(script: RunningScript) -> str:
    """The last lines on the terminal: the error, without the lines of the traceback before it."""
    errors = script.errors
    assert not NOISE.search(errors), errors
    assert errors.count("Traceback (most recent call last)") <= 2, errors
    lines = errors.splitlines()
    last_frame = max((number for number, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    first = next(n for n, line in enumerate(lines) if n > last_frame and line and not line.startswith(" "))
    return "\n".join(lines[first:]).strip()


def line_of(code: str) -> int:
    """The first line of the script that has it."""
    return next(number for number, line in enumerate(FAULTS.read_text().splitlines(), 1) if code in line)


def run(start_script: StartScript, cluster: RunningCluster, mode: str, *more: object) -> RunningScript:
    script = start_script(FAULTS, mode, "--artifacts", "artifacts", *more, management=cluster.management)
    script.wait()
    return script


# --- addresses and roles that are not there ---------------------------------------------------------------------------


def test_an_address_where_nobody_is_is_named_soon(start_script: StartScript) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        script = start_script(FAULTS, "runs", "--artifacts", "artifacts", management=address)
        assert script.wait() == 1
    assert f"no management service answers at {address} within 4 s" in message_of(script)
    assert "`waferbox up`" in message_of(script)


def test_a_missing_role_is_named_with_the_command_that_adds_one(
    start_script: StartScript, tmp_path: Path, start_cluster: StartCluster, role_server: RoleServer
) -> None:
    with start_cluster(tmp_path / "cluster", memoryx=0, workers=0) as cluster, ExitStack() as stack:
        script = run(start_script, cluster, "runs")
        assert script.process.returncode == 1
        commands = re.findall(r"python -m (\w+) --management (\S+?)(?:[;,]|$)", message_of(script), re.MULTILINE)
        assert sorted(commands) == [("memoryx", cluster.management), ("workers", cluster.management)]
        for module, address in commands:
            with cluster.log.open("ab") as log:
                words = ["--management", address]
                process = role_server.start(module, words, cluster.surroundings.variables(), output=log.fileno())
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wait_for(lambda: len(cluster.nodes()) == 3)
        assert run(start_script, cluster, "runs").process.returncode == 0


# --- deaths -----------------------------------------------------------------------------------------------------------


def is_gone(cluster: RunningCluster, address: str) -> bool:
    return address not in [node.address for node in cluster.nodes()]


def start_long(
    start_script: StartScript, cluster: RunningCluster | None, *, fresh: bool = False, **variables: str
) -> RunningScript:
    """On 2 wafers with a worker each and 2 shards; returns when some steps are done."""
    size = ["--num-csx", 2, "--shards", 2]
    script = start_script(
        FAULTS,
        *("runs", "--artifacts", "artifacts", "--num-steps", FOR_EVER, *size),
        management=None if cluster is None else cluster.management,
        fresh=fresh,
        **{**ENDS, **variables},
    )
    script.wait_for_output("step 50\n")
    return script


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory, start_cluster: StartCluster) -> Iterator[RunningCluster]:
    """A cluster whose nodes and coordinators may be killed: what died is started again."""
    roles = {"wafers": 3, "memoryx": 3, "swarmx": 2, "workers": 3}
    with start_cluster(tmp_path_factory.mktemp("victims") / "own", **roles) as cluster:
        yield cluster


@pytest.mark.timeout(300)  # four jobs, of which each ends by a death, and one that runs to its end
def test_a_node_that_dies_is_named_and_the_others_can_be_used(
    start_script: StartScript, victims: RunningCluster
) -> None:
    cluster = victims
    deaths = (
        (node_pb2.ROLE_MEMORYX, "memoryx-"),
        (node_pb2.ROLE_SWARMX, "swarmx-0"),
        (node_pb2.ROLE_WORKER, "worker-"),
        (node_pb2.ROLE_WAFER, "wafer-"),
    )
    for role, name in deaths:
        script = start_long(start_script, cluster)
        victim = next(node for node in cluster.nodes(role) if node.job)
        process = cluster.process_at(victim.address)
        assert process.pid == victim.process_id
        process.kill()
        script.wait_for_error("NodeLostError: ", FAILURE_SECONDS)
        assert script.wait() == 1
        message = message_of(script)
        assert message.startswith("cstorch.errors.NodeLostError: "), message
        died = rf"{name}\d* \(pid {victim.process_id} at {re.escape(victim.address)}\) died"
        assert re.search(died, message), message
        wait_for(partial(is_gone, cluster, victim.address))
    assert run(start_script, cluster, "runs", "--num-csx", 2).process.returncode == 0


@pytest.mark.timeout(300)  # three jobs
@pytest.mark.parametrize("when", ["checkpoint", "final"])
def test_a_death_while_state_moves_is_told_as_such(
    start_script: StartScript, victims: RunningCluster, when: str
) -> None:
    cluster = victims
    for name in ("memoryx-0", "wafer-0", "the coordinator"):
        script = start_script(
            SCRIPTS / "saving.py", when, "--artifacts", "artifacts", management=cluster.management, **ENDS
        )
        script.wait_for_output("saving\n")
        if name == "the coordinator":
            address = next(job.coordinator for job in cluster.jobs() if job.coordinator)
        else:
            address = next(node.address for node in cluster.nodes() if node.member == name)
        cluster.process_at(address).kill()
        if name != "memoryx-0":  # which keeps the state until it hears that the job is over
            wait_for(lambda: not any(node.job for node in cluster.nodes()))
        (script.surroundings.folder / "go").touch()
        assert script.wait() == 1
        message = message_of(script)
        assert message.startswith("cstorch.errors.NodeLostError: "), (name, message)
        assert re.search(rf"{name}\b.* at {re.escape(address)}\)? died", message), (name, message)


def test_a_coordinator_that_dies_is_named_and_its_nodes_can_be_used(
    start_script: StartScript, cluster: RunningCluster
) -> None:
    script = start_long(start_script, cluster)
    job = next(job for job in cluster.jobs() if job.coordinator)
    cluster.process_at(job.coordinator).kill()
    script.wait_for_error("NodeLostError: ", FAILURE_SECONDS)
    assert script.wait() == 1
    message = message_of(script)
    assert f"NodeLostError: the coordinator of {job.job} at {job.coordinator} died" in message
    wait_for(lambda: not any(node.job for node in cluster.nodes()))
    assert run(start_script, cluster, "runs", "--num-csx", 2).process.returncode == 0


def test_the_last_node_of_a_role_is_there_again_for_the_next_job(
    start_script: StartScript, tmp_path: Path, start_cluster: StartCluster
) -> None:
    with start_cluster(tmp_path / "cluster", wafers=1) as cluster:
        (victim,) = cluster.nodes(node_pb2.ROLE_WAFER)
        cluster.process_at(victim.address).kill()
        script = run(start_script, cluster, "runs")
        assert script.process.returncode == 0, script.errors


def test_a_script_whose_cluster_loses_its_owner_is_told_how_to_continue(
    start_script: StartScript, tmp_path: Path, cache: Path, role_server: RoleServer
) -> None:
    """The process that started the cluster is killed: all its processes end with it, one after the other."""
    cluster = RunningCluster(Surroundings(tmp_path / "cluster", cache), server=role_server, wafers=2, memoryx=2)
    try:
        script = start_long(start_script, cluster, WAFERBOX_MAX_NUM_RESTARTS="3")
        cluster.process.kill()
        assert script.wait(FAILURE_SECONDS) == 1
        # Management and the fork server of the coordinator see the owner's end, each for itself: with the fork server
        # first, the coordinator cannot know that the cluster went down with it.
        ended = r"ended: its cluster went down(, or its coordinator alone was terminated)?: start the cluster again"
        assert re.search(ended, message_of(script))
        wait_for(lambda: not cluster.surroundings.processes())
    finally:
        cluster.stop()


# --- what the user's own code does ------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--num-csx", 2, "--workers", 2)], ids=["alone", "4 workers"])
@pytest.mark.parametrize(
    ("mode", "error", "line", "function"),
    [
        ("raises", "ValueError: sample 30 is not a picture", "raise ValueError(f", "decode"),
        ("exits", "SystemExit: 4", "raise SystemExit(4)", "exits"),
    ],
)
def test_the_user_sees_the_traceback_of_an_input_fn_that_raises(
    start_script: StartScript,
    cluster: RunningCluster,
    more: tuple[Any, ...],
    mode: str,
    error: str,
    line: str,
    function: str,
) -> None:
    script = run(start_script, cluster, mode, *more)
    assert script.process.returncode == 1
    errors = script.errors
    assert "InputError: worker-" in errors
    assert re.search(rf"the loader of the input_fn \w+ \(.*\) raised {error}", errors)
    assert f'faults.py", line {line_of(line)}, in {function}' in errors
    assert message_of(script) == error
    wait_for(lambda: cluster.jobs()[0].phase == management_pb2.JOB_PHASE_FAILED)
    assert error in cluster.jobs()[0].message


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("runs_dry", "worker-0: the loader ran dry after 5 batches and more are needed"),
        ("is_empty", "the loader ran dry after 0 batches"),
        ("shrinks", r"worker-0: batch 2 of the input_fn \w+ \(.*:\d+\) has 2 rows, but the .* 8.*drop_last=True"),
        (
            "has_wrong_label",
            r"wafer-0: step 3, aten::nll_loss_forward at \S*faults\.py:\d+: index 7 is out of bounds .*"
            r"operands are float32\[8, 5\] from \S+ to \S+, int64\[8\] from \d to 7: look for data",
        ),
    ],
)
def test_input_that_is_not_there_or_not_alike_is_explained(
    start_script: StartScript, cluster: RunningCluster, mode: str, text: str
) -> None:
    script = run(start_script, cluster, mode)
    assert script.process.returncode == 1
    message = message_of(script)
    assert message.startswith("cstorch.errors.InputError: "), message
    assert len(message.splitlines()) == 1
    assert re.search(text, message), message
    # Also where the script ends while its job is being made.
    wait_for(lambda: not any(node.job for node in cluster.nodes()))


def test_a_matrix_of_weights_that_has_no_inverse_is_explained(
    start_script: StartScript, cluster: RunningCluster
) -> None:
    """MemoryX computes it: the gradient of a weight is the only one that a wafer sends."""
    script = run(start_script, cluster, "singular", "--shards", 2)
    assert script.process.returncode == 1
    where = r"memoryx-\d: step 1, aten::linalg_inv_ex at \S*faults\.py:\d+: linalg\.inv_ex: .* is singular\. "
    assert re.search(rf"InputError: {where}Its operands are float32\[5, 5\] from -?0 to -?0: ", message_of(script))


def test_an_error_raised_in_a_closure_ends_the_job(start_script: StartScript, cluster: RunningCluster) -> None:
    script = run(start_script, cluster, "nan", "--num-csx", 2, "--num-steps", FOR_EVER)
    assert script.process.returncode == 1
    assert message_of(script) == "ValueError: the loss is nan"
    wait_for(lambda: not any(node.job for node in cluster.nodes()))


@pytest.mark.parametrize(
    ("mode", "op", "code", "error"),
    [("no_lowering", "fft", "torch.fft.fft", "TraceError"), ("no_rule", "cumsum", "torch.cumsum", "CompileError")],
)
def test_an_op_that_cannot_be_compiled_is_named_with_its_line(
    start_script: StartScript, cluster: RunningCluster, mode: str, op: str, code: str, error: str
) -> None:
    script = start_script(
        FAULTS,
        *(mode, "--artifacts", "artifacts", "--num-csx", 2),
        management=cluster.management,
        WAFERBOX_STRICT_SHARDING="1",
    )
    script.wait()
    assert script.process.returncode == 1
    message = message_of(script)
    assert message.startswith(f"cstorch.errors.{error}: "), message
    assert op in message
    assert f"faults.py:{line_of(code)}" in message


# --- a script that is suspended ---------------------------------------------------------------------------------------

KEEPALIVE = {"WAFERBOX_KEEPALIVE_SECONDS": "0.3"}  # who answers no ping is given up within 0.8 s
SUSPENDED_SECONDS = 3.0


def suspend(script: RunningScript) -> None:
    """What a debugger does, or Ctrl-Z, and then goes on; for longer than a peer that hangs is waited for."""
    script.process.send_signal(signal.SIGSTOP)
    time.sleep(SUSPENDED_SECONDS)
    script.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory, start_cluster: StartCluster) -> Iterator[RunningCluster]:
    """A cluster that soon gives up whoever answers no ping."""
    folder = tmp_path_factory.mktemp("impatient") / "own"
    with start_cluster(folder, variables=KEEPALIVE, wafers=2, memoryx=2, workers=2) as cluster:
        yield cluster


@pytest.mark.parametrize("embedded", [True, False])
def test_a_script_that_was_suspended_goes_on(
    request: pytest.FixtureRequest, start_script: StartScript, *, embedded: bool
) -> None:
    cluster = None if embedded else request.getfixturevalue("impatient")
    script = start_long(start_script, cluster, fresh=False, **KEEPALIVE)
    suspend(script)
    before = script.output.count("\n")
    script.wait_for_output(f"step {before + 100}\n")
    script.interrupt()
    script.wait()


@pytest.mark.parametrize("lane", ["auto", "grpc"])
@pytest.mark.parametrize("when", ["checkpoint", "final"])
def test_a_script_that_was_suspended_in_a_save_saves(
    start_script: StartScript, impatient: RunningCluster, when: str, lane: str
) -> None:
    arguments = (when, "--artifacts", "artifacts", "--lane", lane)
    script = start_script(SCRIPTS / "saving.py", *arguments, management=impatient.management, **KEEPALIVE)
    script.wait_for_output("saving\n")
    suspend(script)
    (script.surroundings.folder / "go").touch()
    assert script.wait() == 0, script.errors
    assert "done" in script.output
    # gRPC has a log of its own, which a user sets; lines of it begin with a level and the date.
    ours = [line for line in script.errors.splitlines() if not re.match(r"[IWE]\d{4} ", line)]
    assert "goaway" not in "".join(ours).lower()


# --- the end of the script --------------------------------------------------------------------------------------------


def test_ctrl_c_cancels_the_job(start_script: StartScript, cluster: RunningCluster) -> None:
    script = start_long(start_script, cluster)
    (name,) = [job.job for job in cluster.jobs() if job.coordinator]
    script.interrupt()
    script.wait_for_error("KeyboardInterrupt", 5.0)
    assert script.wait() in (1, 130, -signal.SIGINT)
    assert message_of(script) == "KeyboardInterrupt"
    wait_for(lambda: not any(job.coordinator for job in cluster.jobs()))
    (job,) = [job for job in cluster.jobs() if job.job == name]
    assert job.phase == management_pb2.JOB_PHASE_CANCELLED
    wait_for(lambda: not any(node.job for node in cluster.nodes()))


@pytest.mark.parametrize(
    ("mode", "fails", "fresh", "message"),
    [
        ("nan", (), False, "ValueError: the loss is nan"),
        ("runs", ("--fails", "in the loop"), False, "FileExistsError: a file is; there"),
        ("runs", ("--fails", "after the loop"), True, "FileExistsError: a file is; there"),
    ],
    ids=["in a closure", "in the loop", "after the loop"],
)
def test_the_job_of_a_script_that_fails_has_failed(
    start_script: StartScript, cluster: RunningCluster, mode: str, fails: tuple[str, ...], fresh: bool, message: str
) -> None:
    before = {job.job for job in cluster.jobs()}
    arguments = (mode, "--artifacts", "artifacts", *fails)
    script = start_script(SCRIPTS / "faults.py", *arguments, management=cluster.management, fresh=fresh)
    assert script.wait() == 1
    wait_for(lambda: not any(job.coordinator for job in cluster.jobs()))
    (job,) = [job for job in cluster.jobs() if job.job not in before]
    assert job.phase == management_pb2.JOB_PHASE_FAILED
    assert job.message == f"its script failed: {message}"


def test_ctrl_c_ends_the_embedded_cluster(start_script: StartScript) -> None:
    script = start_long(start_script, None, fresh=True)
    assert len(script.surroundings.processes()) > 10
    script.interrupt()
    script.wait_for_error("KeyboardInterrupt", FAILURE_SECONDS)
    assert script.wait() in (1, 130, -signal.SIGINT)
    assert message_of(script) == "KeyboardInterrupt"
    script.surroundings.assert_nothing_left()


def test_ctrl_c_while_the_embedded_cluster_starts_leaves_nothing(start_script: StartScript) -> None:
    script = start_script(FAULTS, "runs", "--artifacts", "artifacts", management=None)
    wait_for(lambda: len(script.surroundings.processes()) > 2)
    script.interrupt()
    script.wait()
    script.surroundings.assert_nothing_left()


def test_a_killed_script_takes_its_embedded_cluster_along(start_script: StartScript) -> None:
    script = start_long(start_script, None)
    script.process.kill()
    script.wait()
    script.surroundings.assert_nothing_left()


def test_a_killed_script_frees_its_nodes(start_script: StartScript, cluster: RunningCluster) -> None:
    script = start_long(start_script, cluster)
    script.process.kill()
    wait_for(lambda: not any(node.job for node in cluster.nodes()))
