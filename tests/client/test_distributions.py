"""The distributions of a step's random numbers, drawn on the CPU by the forms that the step records."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributions

from cstorch._internal.tracing.rewrites import distributions as forms
from cstorch._internal.tracing.truncated_normal import truncated_normal_

COUNT = 200_000


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


def filled(value: float) -> torch.Tensor:
    return torch.full((COUNT,), float(value), dtype=torch.float64)


def is_usual(square: float, degrees: int) -> bool:
    """Whether a chi-square statistic is within five standard deviations of its mean."""
    return square < degrees + 5 * math.sqrt(2 * degrees)


def check_counts(numbers: torch.Tensor, log_probability: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Compares how often each number was drawn with its probability; rare ones are taken together."""
    values = torch.arange(int(numbers.max()) + 1, dtype=torch.float64)
    expected = log_probability(values).exp() * len(numbers)
    drawn = torch.bincount(numbers.long()).double()
    usual = expected > 5
    square = float(((drawn - expected).square() / expected)[usual].sum())
    assert is_usual(square, int(usual.sum()))
    rare = len(numbers) - float(expected[usual].sum())
    assert abs(float(drawn[~usual].sum()) - rare) < 5 * math.sqrt(max(rare, 1))


def check_quantiles(numbers: torch.Tensor, others: torch.Tensor) -> None:
    """Compares numbers with others that torch has drawn: how many are between two twentieths of both."""
    edges = torch.cat([numbers, others]).quantile(torch.linspace(0, 1, 21, dtype=torch.float64)[1:-1])
    first, second = (torch.bincount(torch.bucketize(each, edges), minlength=20).double() for each in (numbers, others))
    assert is_usual(float(((first - second).square() / (first + second).clamp(min=1)).sum()), 19)


@pytest.mark.parametrize("rate", [1e-3, 0.5, 3, 9.9, 10, 10.1, 50, 1000])
def test_poisson(rate: float) -> None:
    check_counts(forms.poisson(filled(rate)), distributions.Poisson(filled(rate)[0]).log_prob)


def test_rates_of_different_sizes() -> None:
    rates = torch.tensor([0.0, 2.0, 1e6, 20.0], dtype=torch.float64).repeat(COUNT)
    numbers = forms.poisson(rates).view(-1, 4)
    assert not numbers[:, 0].any()
    assert torch.allclose(numbers.mean(0), rates[:4], rtol=1e-2)
    assert torch.allclose(numbers[:, 1:].var(0), rates[1:4], rtol=3e-2)


@pytest.mark.parametrize(
    ("trials", "chance"),
    [(1, 0.5), (5, 0.3), (20, 0.5), (21, 0.5), (100, 0.05), (100, 0.1), (100, 0.93), (1000, 0.3), (10_000, 0.002)],
)
def test_binomial(trials: int, chance: float) -> None:
    exact = distributions.Binomial(trials, filled(chance)[0])

    def log_probability(values: torch.Tensor) -> torch.Tensor:
        return torch.where(values <= trials, exact.log_prob(values.clamp(max=trials)), -torch.inf)

    check_counts(forms.binomial(filled(trials), filled(chance)), log_probability)


def test_binomial_numbers_that_are_certain() -> None:
    counts, chances = torch.tensor([0.0, 10.0, 10.0, 1e6, 1e6]), torch.tensor([0.5, 0.0, 1.0, 0.0, 1.0])
    assert forms.binomial(counts, chances).tolist() == [0, 0, 10, 0, 1e6]
    assert forms.binomial(counts.int(), chances).dtype == torch.float32


@pytest.mark.parametrize("concentration", [0.05, 0.5, 0.99, 1, 1.5, 10, 1000])
def test_gamma(concentration: float) -> None:
    check_quantiles(forms.standard_gamma(filled(concentration)), torch._standard_gamma(filled(concentration)))


def test_gammas_are_positive() -> None:
    assert (forms.standard_gamma(filled(1e-3).float()) > 0).all()
    shares = forms.sample_dirichlet(torch.full((COUNT, 2), 1e-3))
    assert torch.allclose(shares.sum(-1), torch.ones(COUNT))


def test_dirichlet() -> None:
    concentrations = torch.tensor([0.3, 1.0, 5.0], dtype=torch.float64).expand(COUNT, 3)
    numbers, others = forms.sample_dirichlet(concentrations), torch._sample_dirichlet(concentrations)
    for place in range(3):
        check_quantiles(numbers[:, place], others[:, place])


IN_PLACE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cauchy": (forms.cauchy_, torch.Tensor.cauchy_),
    "log normal": (forms.log_normal_, torch.Tensor.log_normal_),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_numbers_in_place(name: str) -> None:
    form, original = IN_PLACE[name]
    check_quantiles(form(filled(0)), original(filled(0)))
    check_quantiles(form(filled(0), 0.5, 3), original(filled(0), 0.5, 3))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_geometric(chance: float) -> None:
    exact = distributions.Geometric(filled(chance)[0])  # of the failures before the first success
    check_counts(forms.geometric_(filled(0), chance) - 1, exact.log_prob)
    assert forms.geometric_(torch.zeros(5, dtype=torch.int64), chance).dtype == torch.int64


def test_geometric_needs_a_probability() -> None:
    with pytest.raises(RuntimeError, match=r"p to be in \(0, 1\)"):
        forms.geometric_(torch.zeros(2), 1.0)


@pytest.mark.parametrize("bounds", [(-2, 2), (-1, 9), (1.5, 2), (6, 30), (-30, -8)])
def test_truncated_normal(bounds: tuple[float, float]) -> None:
    numbers = truncated_normal_(filled(0), 0.5, 1.5, *bounds)
    assert bounds[0] <= float(numbers.min()) <= float(numbers.max()) <= bounds[1]
    check_quantiles(numbers, torch.nn.init.trunc_normal_(filled(0), 0.5, 1.5, *bounds))
