"""Closures and traced functions without a cluster."""

from pathlib import Path

import pytest
import torch

import cstorch
from cstorch.utils.data import DataExecutor, DataLoader


@pytest.fixture(autouse=True)
def _cpu_backend(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)


def input_fn() -> list[torch.Tensor]:
    return [torch.full((2,), float(number)) for number in range(5)]


def test_closures_run_at_once_on_their_steps() -> None:
    seen: list[tuple[str, int, float]] = []

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        return batch.sum()

    @cstorch.step_closure
    def report(number: int, value: torch.Tensor) -> None:
        seen.append(("report", number, value.item()))

    @cstorch.checkpoint_closure
    def save(number: int) -> None:
        seen.append(("save", number, 0.0))

    executor = DataExecutor(DataLoader(input_fn), num_steps=5, checkpoint_steps=4, activation_steps=2)
    for batch in executor:
        value = step(batch)
        report(executor.user_iteration, value)
        save(executor.user_iteration)
    assert seen == [
        ("report", 2, 2.0),
        ("report", 4, 6.0),
        ("save", 4, 0.0),
        ("report", 5, 8.0),
        ("save", 5, 0.0),
    ]


def test_outside_an_executor_closures_and_steps_are_functions() -> None:
    @cstorch.step_closure
    def double(value: int) -> int:
        """Doubles."""
        return 2 * value

    assert double(2) == 4
    assert double.__doc__ == "Doubles."
    assert cstorch.trace(lambda value: value + 1)(1) == 2


@pytest.mark.parametrize("decorator", [cstorch.step_closure, cstorch.checkpoint_closure, cstorch.trace])
def test_decorators_want_functions(decorator: object) -> None:
    with pytest.raises(TypeError, match="decorates a function"):
        decorator(3)  # type: ignore[operator]
