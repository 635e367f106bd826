"""Scripts with other threads, and forked processes: they share the backend, or are refused with a way out."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fake_cluster import FakeCluster, StartCluster
from torch import nn
from user_script import Script, step_of_cluster

import cstorch
from cstorch._internal.tracing import trace_step
from cstorch.errors import UsageError
from waferbox.host.descriptors import readable

CHILD_SECONDS = 20.0


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(step_of_cluster)


def in_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def test_threads_that_make_the_backend_at_once_get_one(tmp_path: Path) -> None:
    together = threading.Barrier(4)

    def make(_: int) -> int:
        together.wait()
        return id(cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True))

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(make, range(4)))) == 1


def test_an_optimizer_of_another_thread_is_not_of_the_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    other = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        in_thread(other.step)
        return x * 2

    trace = trace_step(step, torch.ones(2), {}, {}, lambda out: [("out", out)])
    assert not trace.optimizers
    assert torch.equal(weight.detach(), torch.full((2,), 0.9))


def test_the_loop_of_another_thread_is_named(tmp_path: Path) -> None:
    script = Script(tmp_path)

    def body(batch: torch.Tensor) -> None:
        script.step(batch)
        with pytest.raises(UsageError, match="another thread of this process is in the loop of an executor"):
            in_thread(lambda: cstorch.compile(nn.Linear(2, 2)))
        with pytest.raises(UsageError, match="compile a model before the loop of an executor, not inside it"):
            cstorch.compile(nn.Linear(2, 2))

    script.loop(body)


def test_a_forked_process_is_refused_the_cluster_of_its_parent(cluster: FakeCluster, tmp_path: Path) -> None:
    script = Script(tmp_path, cluster)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            script.loop(script.step)
        except UsageError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert "forked from the one that uses the cluster" in text
    assert "get_context('spawn')" in text


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_process_that_is_forked_in_the_loop_leaves_the_execution_alone(
    start_cluster: StartCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, goes_on: bool
) -> None:
    """It waits for no outputs, which only its parent gets."""
    has_ended = threading.Event()

    def step_after_child(state: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        assert step < 2 or has_ended.wait(2 * CHILD_SECONDS)
        return step_of_cluster(state, step)

    script = Script(tmp_path, start_cluster(step_after_child))
    reader, writer = os.pipe()
    texts = [""]
    steps = iter(range(3))

    def body(batch: torch.Tensor) -> None:
        script.step(batch)
        if next(steps) != 1:
            return
        caplog.clear()
        child = os.fork()
        if child == 0:
            if not goes_on:
                sys.exit()
            return
        os.close(writer)
        if readable([reader], CHILD_SECONDS):
            texts.append(os.read(reader, 10_000).decode())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        has_ended.set()

    try:
        script.loop(body, [torch.ones(4, 2)] * 3, num_steps=3)
    except (SystemExit, UsageError) as error:  # in the child
        gc.collect()  # ends the loop
        os.write(writer, f"{error!r} {caplog.text}".encode())
        os._exit(0)
    if goes_on:
        assert "forked from the one that uses the cluster" in texts[-1]
    else:
        assert texts[-1] == "SystemExit() "


def test_a_model_of_a_closed_backend_is_named(tmp_path: Path) -> None:
    old = Script(tmp_path)
    cstorch.close_backend()
    new = Script(tmp_path)
    with pytest.raises(UsageError, match="this Linear was compiled for a backend that is closed: make the model"):
        new.loop(old.step)
