"""What an execution refuses, and how the message begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster
from halved_weight import Setup, run
from torch import nn

import cstorch
from cstorch.errors import (
    UsageError,
)


def run_two_steps(setup: Setup, body: Callable[[Any], object]) -> None:
    run(setup.executor(2), body)


def test_weight_to_a_step_closure(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    report = cstorch.step_closure(lambda weight: None)
    with pytest.raises(UsageError, match="Attempting to get weight tensor 'weight' in a step closure"):
        run_two_steps(setup, lambda batch: (setup.step(batch), report(setup.model.weight)))


def test_tensor_that_is_no_output(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    steps = iter(range(2))
    report = cstorch.step_closure(lambda value: None)
    with pytest.raises(UsageError, match="not an output of the step"):
        run_two_steps(setup, lambda batch: (setup.step(batch), next(steps) and report(setup.model.weight[0])))


def test_no_traced_function(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    with pytest.raises(UsageError, match=r"no @cstorch.trace function was called"):
        run_two_steps(setup, lambda batch: None)


def test_traced_function_called_twice(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    with pytest.raises(UsageError, match=r"test_session_misuse\.py:\d+.*called twice for one batch"):
        run_two_steps(setup, lambda batch: (setup.step(batch), setup.step(batch)))


def test_two_traced_functions(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    steps = iter([setup.step, cstorch.trace(lambda batch: setup.compiled(batch).sum())])
    with pytest.raises(UsageError, match=r"test_session_misuse\.py:\d+ a second @.*another DataExecutor"):
        run_two_steps(setup, lambda batch: next(steps)(batch))


def test_another_structure(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    structures: list[Callable[[torch.Tensor], Any]] = [lambda batch: batch, lambda batch: [batch, batch]]
    inputs = iter(structures)
    with pytest.raises(UsageError, match=r"test_session_misuse\.py:\d+ .*structure.*another DataExecutor"):
        run_two_steps(setup, lambda batch: setup.step(next(inputs)(batch)))


def test_traced_function_outside_a_loop(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    with pytest.raises(UsageError, match=r"inside `for batch in executor:`"):
        setup.step(torch.ones(4, 2))


def test_two_models(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    other = cstorch.compile(nn.Linear(2, 1))
    step = cstorch.trace(lambda batch: setup.compiled(batch).sum() + other(batch).sum())
    with pytest.raises(UsageError, match="two compiled models"):
        run_two_steps(setup, step)


def test_tensor_that_is_not_of_the_batch(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    with pytest.raises(UsageError, match="not part of the executor's batch"):
        run_two_steps(setup, lambda batch: setup.step(torch.ones(4, 2)))
