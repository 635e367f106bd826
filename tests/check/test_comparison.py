"""The comparison of steps on the cluster with those of PyTorch: what is rounding, and what is not."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors.torch import save_file

from waferbox.check.comparison import CLOSE, Comparison, compare, needs_judge, not_repeated

INF, NAN = math.inf, math.nan

Files = dict[tuple[int, int], Path]
Values = Sequence[Sequence[float]]  # after each step


class SaveSteps(Protocol):
    def __call__(self, name: str, *values: Mapping[str, Sequence[float]], first: int = 1) -> Files: ...


@pytest.fixture
def steps(tmp_path: Path) -> SaveSteps:
    """Returns a function that saves values of tensors, by name, after the steps from the first on."""

    def save(name: str, *values: Mapping[str, Sequence[float]], first: int = 1) -> Files:
        files: Files = {}
        for step, named in enumerate(values, first):
            files[1, step] = tmp_path / f"{name}-{step}"
            tensors = {key: torch.tensor(value, dtype=torch.float64) for key, value in named.items()}
            save_file(tensors, files[1, step])
        return files

    return save


Compared = Callable[[Values, Values, Values], Comparison]


@pytest.fixture
def compared(steps: SaveSteps) -> Compared:
    """Returns a function that compares a tensor after some steps on the cluster, by PyTorch, and by the judge."""

    def compare_values(ours: Values, theirs: Values, exact: Values) -> Comparison:
        cluster, eager, judge = (
            steps(name, *[{"w": value} for value in values])
            for name, values in (("cluster", ours), ("eager", theirs), ("judge", exact))
        )
        assert needs_judge(cluster, eager, CLOSE) is (ours != theirs)
        return compare(cluster, eager, judge, CLOSE)

    return compare_values


def test_rounding(compared: Compared) -> None:
    result = compared([[1.0, 2.001]], [[1.0, 2.002]], [[1.0, 2.0]])
    assert (result.steps, result.tensors, result.first) == (1, 1, None)
    assert result.largest == pytest.approx(0.001 / 2.002)


def test_difference(compared: Compared) -> None:
    result = compared([[1.0, 2.0], [1.0, 3.0]], [[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]])
    assert result.steps == 1
    assert [(each.step, each.name, each.error, each.rounding) for each in result.differences] == [(2, "w", 0.5, 0.0)]


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_overflow_on_the_cluster_alone(compared: Compared, value: float) -> None:
    result = compared([[1.0, 2.0], [1.0, value]], [[1.0, 2.0], [1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]])
    assert (result.steps, result.largest) == (1, 0.0)
    assert [(each.step, each.name) for each in result.not_finite] == [(2, "w")]
    assert (result.differences, result.overflowed) == ((), ())


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("ours", [INF, NAN, 2.0])
def test_overflow_by_both_is_no_rounding(compared: Compared, ours: float, value: float) -> None:
    if ours == value:
        ours = -INF
    result = compared([[1.0, ours]], [[1.0, value]], [[1.0, 2.0]])
    assert (result.steps, result.largest) == (0, 0.0)
    assert [(each.step, each.name) for each in result.overflowed] == [(1, "w")]
    assert (result.differences, result.not_finite) == ((), ())


def test_infinity_that_the_judge_has_too(compared: Compared) -> None:
    result = compared([[1.0, INF], [1.1, INF]], [[1.0, INF], [1.0, INF]], [[1.0, INF], [1.05, INF]])
    assert (result.steps, result.first) == (2, None)
    assert result.largest == pytest.approx(0.1)


def test_infinity_of_another_sign_is_a_difference(compared: Compared) -> None:
    result = compared([[1.0, -INF]], [[1.0, INF]], [[1.0, INF]])
    assert [each.error for each in result.differences] == [INF]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ([{"w": [1.0, NAN]}, {"w": [2.0, 3.0], "input.0": [1.0]}], None),
        ([{"w": [1.5, NAN]}, {"w": [1.0, 2.0], "input.0": [1.0]}], "w"),
        ([{"w": [1.0, NAN]}, {"w": [1.0, 2.0], "input.0": [1.5]}], "input.0"),
    ],
)
def test_script_that_draws_other_numbers_in_each_run(
    steps: SaveSteps, other: list[dict[str, list[float]]], name: str | None
) -> None:
    one = [{"w": [1.0, NAN]}, {"w": [1.0, 2.0], "input.0": [1.0]}]
    assert not_repeated(steps("one", *one, first=0), steps("other", *other, first=0)) == name
