"""The vendor's client of release 2.10.0, unmodified, on a real cluster, beside its own CPU backend."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_rig import RunningCluster, running_cluster, wait_for

from wsc.v1 import management_pb2, node_pb2

PYTHON = os.environ.get("WAFERBOX_VENDOR_PYTHON", "")
SCRIPTS = Path(__file__).parent / "scripts"
SECONDS = 400.0  # the client itself waits some 40 s, by its own constants

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder, cache = tmp_path_factory.mktemp("vendor") / "own", tmp_path_factory.mktemp("cache")
    with running_cluster(folder, cache, "--vendor-python", PYTHON, wafers=2, memoryx=2) as cluster:
        yield cluster


@pytest.fixture
def variables(cluster: RunningCluster) -> dict[str, str]:
    (config,) = cluster.surroundings.temporary.glob("*.csconfig")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("WAFERBOX_", "PYTHON"))}
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
    return {**inherited, "CSCONFIG_PATH": str(config), "PATH": path}


def begin(variables: dict[str, str], *arguments: object, script: str = "train.py") -> "subprocess.Popen[str]":
    command = [PYTHON, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def run(variables: dict[str, str], *arguments: object, script: str = "train.py") -> tuple[int, str]:
    process = begin(variables, *arguments, script=script)
    try:
        text, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, text


def result(variables: dict[str, str], *arguments: object, script: str = "train.py") -> Any:
    status, text = run(variables, *arguments, script=script)
    assert status == 0, text
    return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))


def losses(found: Any) -> Sequence[float]:
    return [loss for _, loss, _ in found["log"]]


# Its lowering has the products in float16, whatever a script says of mixed precision; its CPU backend float32.
@pytest.mark.parametrize(
    ("network", "optimizer", "csx", "more", "bound"),
    [
        ("vectors", "sgd", 1, [], 2e-4),
        ("vectors", "adamw", 2, [], 2e-4),
        ("vectors", "adamw", 1, ["--half"], 2e-4),
        ("images", "sgd", 1, [], 5e-3),
        ("images", "sgd", 2, [], 5e-3),
        ("text", "adamw", 1, [], 5e-4),
        ("text", "adamw", 2, ["--half"], 5e-4),
    ],
)
def test_it_trains_evaluates_and_trains_on(
    cluster: RunningCluster,
    variables: dict[str, str],
    tmp_path: Path,
    network: str,
    optimizer: str,
    csx: int,
    more: list[str],
    bound: float,
) -> None:
    own = result(variables, "cpu", tmp_path / "cpu", network, optimizer)
    found = result(variables, "csx", tmp_path / "csx", network, optimizer, "--csx", csx, *more)
    differences = [abs(loss / expected - 1) for loss, expected in zip(losses(found), losses(own), strict=True)]
    print(f"losses differ by {max(differences):.1e} at most")
    assert max(differences) < bound
    assert [value for *_, value in found["log"]] == [value for *_, value in own["log"]]  # accuracy
    assert found["weights"] == pytest.approx(own["weights"], rel=10 * bound)
    job = cluster.jobs()[0]
    assert job.phase == management_pb2.JOB_PHASE_SUCCEEDED
    assert (job.num_csx, list(job.labels)) == (csx, ["test=live"])


@pytest.mark.parametrize("name", ["forward_linear_outputs", "forward_no_weights", "model_residual"])
def test_a_model_of_ones_own_gives_what_the_cpu_backend_gives(
    variables: dict[str, str], tmp_path: Path, name: str
) -> None:
    status, text = run(variables, tmp_path, name, script="trace_layers.py")
    assert status == 0, text
    outputs = torch.load(tmp_path / name / "record.pt", weights_only=True)["outputs"]
    status, text = run(variables, "--cluster", tmp_path / "csx", name, script="trace_layers.py")
    assert status == 0, text
    made = json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("[[[")))
    for values, wanted in zip(made, outputs, strict=True):
        for value, expected in zip(values, wanted, strict=True):
            assert value == pytest.approx(expected.flatten().tolist(), rel=5e-3, abs=5e-3)


def test_a_step_that_the_client_cannot_lower_is_explained(variables: dict[str, str], tmp_path: Path) -> None:
    status, text = run(variables, "--cluster", tmp_path, "input_uint8", script="trace_layers.py")
    assert status != 0
    assert "the client has sent no text for the step" in text
    assert "x.to(torch.int32)" in text


def test_steps_whose_gradients_overflow_change_nothing(variables: dict[str, str], tmp_path: Path) -> None:
    found = result(variables, "csx", tmp_path, "vectors", "sgd", "--half", "--overflow")
    assert found["weights"] == pytest.approx(found["first"], rel=1e-6)


def test_a_loader_goes_on_where_the_checkpoint_was_saved(variables: dict[str, str], tmp_path: Path) -> None:
    whole = result(variables, tmp_path / "whole", 6, script="go_on.py")
    first = result(variables, tmp_path / "parts", 4, script="go_on.py")
    rest = result(variables, tmp_path / "parts", 2, script="go_on.py")
    assert first["losses"] + rest["losses"] == pytest.approx(whole["losses"], rel=1e-6)


def test_the_death_of_a_wafer_is_told_and_changes_nothing(
    cluster: RunningCluster, variables: dict[str, str], tmp_path: Path
) -> None:
    expected = result(variables, "csx", tmp_path / "undisturbed", "vectors", "sgd", "--steps", 400)
    process = begin(variables, "csx", tmp_path / "csx", "vectors", "sgd", "--steps", 400)
    try:
        wait_for_steps(process)
        (wafer,) = (node for node in cluster.nodes(node_pb2.ROLE_WAFER) if node.job)
        os.kill(wafer.process_id, signal.SIGKILL)
        text, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, text
    assert "wafer-0" in text
    assert json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{"))) == expected


def test_an_input_function_that_raises_is_explained(variables: dict[str, str], tmp_path: Path) -> None:
    status, text = run(variables, "csx", tmp_path, "vectors", "sgd", "--failing")
    assert status != 0
    assert "worker-0: the loader of the input_fn" in text
    assert "OSError: the third batch cannot be read" in text


def wait_for_steps(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("train: "):
            return
    raise AssertionError("it ended before its first step")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_client_that_ends_frees_the_nodes(
    cluster: RunningCluster, variables: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    process = begin(variables, "csx", tmp_path, "vectors", "sgd", "--steps", 1_000_000)
    try:
        wait_for_steps(process)
        assert any(node.job for node in cluster.nodes())
        process.send_signal(number)
        then = time.monotonic()
        wait_for(lambda: all(not node.job for node in cluster.nodes()))
        assert time.monotonic() - then < 10
        assert cluster.jobs()[0].phase == management_pb2.JOB_PHASE_CANCELLED
    finally:
        process.kill()
        process.communicate()
