"""The pytest plugin: one cluster for all processes of a run, a job for each test, and nothing afterwards."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from waferbox.launch.local_clusters import Starter, recorded

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# As a user would write them.
TESTS = """
import os

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


def input_fn():
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows), 8)


def train(backend):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)
    losses = []

    @cstorch.trace
    def step(batch):
        loss = compiled(batch[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def report(loss):
        losses.append(loss.item())

    for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=5):
        report(step(batch))
    return losses


@pytest.mark.parametrize("number", range({count}))
def test_the_loss_falls(csx_backend, number):
    losses = train(csx_backend)
    assert losses[-1] < losses[0]


@pytest.mark.waferbox(wafers={wafers})
def test_a_script_with_a_backend_of_its_own():
    assert os.environ["WAFERBOX_MANAGEMENT"]
    config = cstorch.distributed.ClusterConfig(num_csx={wafers})
    assert len(train(cstorch.backend("CSX", cluster_config=config))) == 5


def test_without_a_cluster():
    assert "WAFERBOX_MANAGEMENT" not in os.environ
    assert cstorch.current_backend(raise_exception=False) is None
"""


def environment(folder: Path) -> dict[str, str]:
    hidden = ("WAFERBOX_MANAGEMENT", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**inherited, "XDG_RUNTIME_DIR": str(folder), "WAFERBOX_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}


def start(folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider"]
    return subprocess.Popen(
        [*command, *options, str(folder / "test_steps.py")],
        cwd=folder,
        env={**environment(folder), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def clusters(folder: Path) -> list[psutil.Process]:
    """The processes of a folder's run that own a cluster."""
    found = []
    for process in psutil.process_iter():
        try:
            if "waferbox.cluster.embedded" in process.cmdline() and process.environ()["TMPDIR"] == str(folder):
                found.append(process)
        except (psutil.Error, KeyError):
            continue
    return found


def test_processes_share_a_cluster_and_each_test_has_a_job(tmp_path: Path) -> None:
    """The cluster has two wafers, as one of the tests needs them, and a job each of the others."""
    (tmp_path / "test_steps.py").write_text(TESTS.format(count=3, wafers=2))
    with start(tmp_path, "-n", "2", "-v") as run:
        assert run.stdout is not None
        most = 0
        lines = []
        for line in run.stdout:
            lines.append(line)
            most = max(most, len(clusters(tmp_path)))
    output = "".join(lines)
    assert run.returncode == 0, output
    assert "5 passed" in output
    assert {"gw0", "gw1"} <= set(re.findall(r"\[(gw\d)\]", output))
    assert most == 1
    assert clusters(tmp_path) == []
    assert not (tmp_path / "waferbox").exists()


KEPT = """

kept = []


def test_that_fails_in_a_loop(csx_backend):
    cstorch.compile(torch.nn.Linear(4, 1), csx_backend)
    batches = iter(cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=5))
    (rows,) = next(batches)
    assert rows.shape == (1, 1)


def test_that_keeps_its_loop(csx_backend):
    cstorch.compile(torch.nn.Linear(4, 1), csx_backend)
    kept.append(iter(cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=5)))
    next(kept[0])


def test_after_them(csx_backend):
    assert len(train(csx_backend)) == 5
"""


def test_a_loop_that_a_test_leaves_open_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "test_steps.py").write_text(TESTS.format(count=0, wafers=1) + KEPT)
    with start(tmp_path) as run:
        assert run.stdout is not None
        output = run.stdout.read()
    assert "1 failed, 4 passed, 1 skipped" in output, output
    assert "FAILED test_steps.py::test_that_fails_in_a_loop" in output
    assert "error" not in output.splitlines()[-1]
    assert "Exception ignored" not in output


def test_the_cluster_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    text = TESTS.format(count=1, wafers=1).replace("losses = train(csx_backend)", "print('READY', flush=True); input()")
    (tmp_path / "test_steps.py").write_text(text)
    with start(tmp_path, "-s") as run:
        assert run.stdout is not None
        assert any("READY" in line for line in run.stdout)
        (owner,) = clusters(tmp_path)
        run.send_signal(signal.SIGKILL)
        owner.wait(30)
    assert not (tmp_path / "waferbox").exists()


NAMED = """
import os

import pytest


@pytest.mark.waferbox
def test_named(waferbox_cluster):
    print("FIXTURE", waferbox_cluster, "VARIABLE", os.environ["WAFERBOX_MANAGEMENT"])
"""


@pytest.mark.parametrize(
    ("named", "expected"), [("mine", "127.0.0.1:1"), ("127.0.0.1:2", "127.0.0.1:2"), ("embedded", "embedded")]
)
def test_the_fixture_is_the_address_of_the_named_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, expected: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "test_steps.py").write_text(NAMED)
    with recorded(Starter.UP, "mine", "127.0.0.1:1"), start(tmp_path, "-s", WAFERBOX_MANAGEMENT=named) as run:
        assert run.stdout is not None
        output = run.stdout.read()
    assert run.returncode == 0, output
    assert f"FIXTURE {expected} VARIABLE {named}" in output


def test_a_name_that_no_cluster_has_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_steps.py").write_text(NAMED)
    with start(tmp_path, WAFERBOX_MANAGEMENT="nobody") as run:
        assert run.stdout is not None
        output = run.stdout.read()
    assert "WAFERBOX_MANAGEMENT is 'nobody', which is neither host:port nor a cluster of this machine" in output


@pytest.mark.parametrize(("given", "options"), [("2", []), ("2", ["-n", "2"]), ("wafers=1025", [])])
def test_a_marker_that_is_not_understood_is_an_error(tmp_path: Path, given: str, options: Sequence[str]) -> None:
    text = f"import pytest\n\n@pytest.mark.waferbox({given})\ndef test_it(): pass\n\ndef test_other(): pass\n"
    (tmp_path / "test_steps.py").write_text(text)
    with start(tmp_path, *options) as run:
        assert run.stdout is not None
        output = run.stdout.read()
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, output
    assert "test_steps.py::test_it: the marker is written as @pytest.mark.waferbox(wafers=2)" in output
    assert "1 passed, 1 error" in output


LEFT_OPEN = """
import pytest

import cerebras.pytorch as cstorch


def test_forgets_its_marker():
    cstorch.backend("CPU")


def test_also_without():
    pass


@pytest.mark.waferbox
def test_is_innocent():
    raise AssertionError("nothing runs")
"""


def test_a_backend_that_a_test_without_a_marker_leaves_open_is_that_tests(tmp_path: Path) -> None:
    (tmp_path / "test_steps.py").write_text(LEFT_OPEN)
    with start(tmp_path, "-v") as run:
        text, _ = run.communicate(timeout=120)
    assert "test_steps.py::test_forgets_its_marker has left a backend open" in text, text
    assert "mark that test with @pytest.mark.waferbox" in text
    assert "2 passed, 1 error" in text
