"""Iterators of executors that a script keeps in the middle of their loops, as in a global or in an error's frame."""

import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster, until
from halved_weight import Setup

import cstorch
from cstorch._internal.execution import current_execution
from cstorch.errors import UsageError
from waferbox.testing.plugin import begin_anew

SCRIPT = """
import torch
import cstorch

backend = cstorch.backend({backend})
model = cstorch.compile(torch.nn.Linear(2, 2), backend)
step = cstorch.trace(lambda batch: model(batch).sum())


def input_fn():
    return [torch.ones(4, 2)]


batches = iter(cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=4))
{rest}
"""


def kept(setup: Setup) -> Generator[Any]:
    """An iterator in its second step, whose function was called."""
    batches = iter(setup.executor(5))
    setup.step(next(batches))
    setup.step(next(batches))
    return batches


@pytest.mark.parametrize("backend", ['"CPU"', '"CSX", validate_only=True'])
@pytest.mark.parametrize(
    "rest", ["next(batches)", "step(next(batches))", "def run(batches):\n    next(batches)\n    1 / 0\nrun(batches)"]
)
def test_a_script_ends_quietly_with_a_kept_iterator(tmp_path: Path, backend: str, rest: str) -> None:
    text = SCRIPT.format(backend=backend, rest=rest)
    ended = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == (1 if "1 / 0" in rest else 0)
    assert "Exception ignored" not in ended.stderr
    assert "atexit" not in ended.stderr


def test_the_end_of_a_test_leaves_its_loop_without_another_step(cluster: FakeCluster, tmp_path: Path) -> None:
    batches = kept(Setup(cluster, tmp_path))
    begin_anew()
    assert current_execution() is None
    assert next(batches, None) is None
    assert cstorch.current_backend(raise_exception=False) is None
    until(lambda: cluster.cancelled == ["job-1"])
    assert cluster.stopped_after in ([1], [])  # the end of the job may overtake it


def test_an_ended_thread_is_in_no_loop(cluster: FakeCluster, tmp_path: Path) -> None:
    setup, loops = Setup(cluster, tmp_path), []
    thread = threading.Thread(target=lambda: loops.append(kept(setup)))
    thread.start()
    thread.join()
    begin_anew()
    assert current_execution() is None


def test_the_end_of_a_block_leaves_the_loop_in_it(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    losses: list[float] = []
    note = cstorch.step_closure(lambda loss: losses.append(float(loss)))
    with setup.backend:
        batches = iter(setup.executor(5))
        note(setup.step(next(batches)))
    assert losses == [1.0]
    assert next(batches, None) is None


def test_the_error_in_a_block_is_that_of_the_script(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    with pytest.raises(ZeroDivisionError) as caught, setup.backend:  # noqa: PT012
        batches = kept(setup)
        raise ZeroDivisionError
    assert caught.value.__context__ is None
    assert next(batches, None) is None


def test_a_block_within_a_loop_cannot_close_the_backend(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    batches = kept(setup)
    with pytest.raises(UsageError, match="the backend cannot be closed inside the loop of an executor"), setup.backend:
        pass
    setup.step(next(batches))
    assert setup.traces == 1


def test_what_a_kept_iterator_prevents_says_how_to_end_it(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    batches = kept(setup)
    for refused in (setup.backend.release, cstorch.close_backend, lambda: next(iter(setup.executor()))):
        with pytest.raises(UsageError, match=r"is in its loop until `batches\.close\(\)`"):
            refused()
    batches.close()
    setup.backend.release()
    assert setup.weight() == 1 / 4
    cstorch.close_backend()


def test_a_second_iterator_changes_nothing_of_the_first(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    executor = setup.executor(3)
    batches = iter(executor)
    setup.step(next(batches))
    before = executor.iteration, executor.profiler, executor.artifact_dir
    with pytest.raises(UsageError, match="another DataExecutor is being iterated"):
        next(iter(executor))
    assert (executor.iteration, executor.profiler, executor.artifact_dir) == before
    for batch in batches:
        setup.step(batch)
    assert setup.weight() == 1 / 8


def test_a_dropped_iterator_has_left_its_loop(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    batches = kept(setup)
    del batches
    assert setup.weight() == 1 / 4
