"""Decompositions of matrices, of weights and of samples, with their gradients, against plain torch."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from compiled_steps import Traced
from plan_simulator import Simulation
from torch import distributions, nn
from torch.nn.utils import parametrizations

from appliance.compiler.core.target import Half, Precision
from waferbox.cirh.execution.kernel import OperationFailed

pytestmark = pytest.mark.parity

SIZE = 4
CLUSTERS = [(1, 1), (2, 1), (4, 2)]
Loss = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


def identity(like: torch.Tensor) -> torch.Tensor:
    return torch.eye(SIZE, dtype=like.dtype, device=like.device)


def covariance(weight: torch.Tensor) -> torch.Tensor:
    return weight @ weight.mT + identity(weight)


def matrices_of(x: torch.Tensor) -> torch.Tensor:
    """A positive definite matrix for each row."""
    return x.unsqueeze(-1) * x.unsqueeze(-2) + identity(x)


def whitened(m: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """By the covariance of the whole batch."""
    y = m(x)
    centred = y - y.mean(0)
    root = torch.linalg.cholesky(centred.mT @ centred / (len(y) - 1) + 0.1 * identity(y))
    return torch.linalg.solve_triangular(root, centred.mT, upper=False).abs().mean()


LOSSES: Mapping[str, Loss] = {
    "a flow": lambda m, x: m(x).pow(2).mean() - torch.linalg.slogdet(m.weight)[1],
    "its inverse": lambda m, x: (m(x) @ torch.linalg.inv(m.weight)).pow(2).mean(),
    "a normal distribution": lambda m, x: (
        -distributions.MultivariateNormal(m(x), covariance(m.weight)).log_prob(torch.ones_like(x)).mean()
    ),
    "one by its precision": lambda m, x: (
        -distributions.MultivariateNormal(m.bias, precision_matrix=covariance(m.weight)).log_prob(m(x)).mean()
    ),
    "a Wishart distribution": lambda m, x: (
        m(x).mean()
        - distributions.Wishart(x.new_tensor(7.0), covariance_matrix=covariance(m.weight)).log_prob(identity(x))
    ),
    "the divergence of two": lambda m, x: distributions.kl_divergence(
        distributions.MultivariateNormal(m(x), matrices_of(x)),
        distributions.MultivariateNormal(torch.zeros_like(m.bias), covariance(m.weight)),
    ).mean(),
    "whitening": whitened,
    "determinants of samples": lambda m, x: torch.linalg.det(matrices_of(m(x))).mean(),
    "systems of samples": lambda m, x: torch.linalg.solve(matrices_of(m(x)), x).pow(2).mean(),
    "one system for all": lambda m, x: torch.linalg.solve(covariance(m.weight), m(x).unsqueeze(-1)).pow(2).mean(),
    "systems of samples with weights": lambda m, x: torch.linalg.solve(matrices_of(x), m.weight).pow(2).mean(),
    "triangles": lambda m, x: (
        torch.linalg.solve_triangular(torch.linalg.cholesky(matrices_of(m(x))), m.weight, upper=False).pow(2).mean()
    ),
    "spectra": lambda m, x: (
        torch.linalg.svdvals(m.weight).sum()
        + torch.linalg.eigvalsh(covariance(m.weight)).log().sum()
        + torch.linalg.matrix_norm(m.weight, "nuc")
        + m(x).mean()
    ),
    "projections": lambda m, x: (torch.linalg.qr(m.weight)[0] @ m(x).mT).pow(3).mean(),
    "a pseudoinverse": lambda m, x: (m(x)[:, :2] @ torch.linalg.pinv(m.weight[:, :2]) * x).mean(),
    "a pseudoinverse of less rank": lambda m, x: (
        (torch.linalg.pinv(m.weight[:, :1] @ m.weight[:1], rtol=1e-3, atol=1e-4) @ m(x).mT).pow(2).mean()
    ),
    "a symmetric pseudoinverse": lambda m, x: torch.linalg.pinv(matrices_of(m(x)), hermitian=True).pow(2).mean(),
    "an exponential": lambda m, x: (m(x) @ torch.linalg.matrix_exp(m.weight - m.weight.mT)).pow(3).mean(),
    "a factorisation": lambda m, x: (
        torch.linalg.lu_solve(*torch.linalg.lu_factor(covariance(m.weight)), m(x).mT).pow(2).mean()
    ),
    "a Cholesky factor": lambda m, x: (
        torch.cholesky_solve(m(x).mT, torch.linalg.cholesky(covariance(m.weight))).pow(2).mean()
        + torch.cholesky_inverse(torch.linalg.cholesky(covariance(m.weight))).mean()
    ),
}


def traced(loss: Loss, model: nn.Module | None = None, *, double: bool = True) -> tuple[Traced, list[torch.Tensor]]:
    def build(m: Any) -> Any:
        def step(x: torch.Tensor) -> list[torch.Tensor]:
            made = loss(m, x)
            return [made.detach(), *torch.autograd.grad(made, list(m.parameters()), allow_unused=True)]

        return step

    torch.manual_seed(3)
    model = model or nn.Linear(SIZE, SIZE)
    batch = torch.randn(8, SIZE, dtype=torch.float64 if double else torch.float32)
    return Traced(build, model, batch, double=double), [batch, batch.flip(0)]


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    step, batches = traced(LOSSES[name])
    step.check(batches, CLUSTERS)


@pytest.mark.parametrize("kind", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_weights(kind: str) -> None:
    torch.manual_seed(3)
    model = parametrizations.orthogonal(nn.Linear(SIZE, SIZE), orthogonal_map=kind)
    step, batches = traced(lambda m, x: m(x).pow(3).mean(), model)
    step.check(batches, CLUSTERS)


def test_matrices_of_samples_are_computed_where_the_samples_are() -> None:
    step, _ = traced(lambda m, x: torch.linalg.slogdet(matrices_of(m(x)))[1].mean())
    plan = step.plan(4)
    (determinants,) = [kernel.cirh for kernel in plan.wafer.kernels if "aten._linalg_slogdet" in kernel.cirh]
    assert "tensor<2x4x4x" in determinants


def test_halves_are_computed_in_float32() -> None:
    step, batches = traced(lambda m, x: torch.linalg.slogdet(covariance(m.weight))[1] + m(x).mean(), double=False)
    plan = step.plan(1, precision=Precision(half=Half.BFLOAT16, level=1))
    made = Simulation(plan, step.initial).run([[batches[0]]], 1)[0]["output_0"]
    expected = step.expected(batches[:1])[0][0][0]
    assert float(made) == pytest.approx(float(expected), rel=0.01)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda m, x: torch.linalg.inv(matrices_of(m(x)) * 0.0).mean(), "singular"),
        (lambda m, x: torch.linalg.cholesky(-covariance(m.weight)).mean() + m(x).mean(), "not positive-definite"),
    ],
)
def test_what_has_no_result_is_an_error(loss: Loss, text: str) -> None:
    step, batches = traced(loss)
    plan = step.plan(1)
    sources = [*plan.wafer.sources, *(each for shard in plan.memoryx for each in shard.sources)]
    assert "test_matrices.py:" in str(sources)
    with pytest.raises(OperationFailed, match=text):
        Simulation(plan, step.initial).run([[batches[0]]], 1)


def test_the_form_without_a_check_shows_what_failed() -> None:
    def loss(m: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        factor, info = torch.linalg.cholesky_ex(-covariance(m.weight))
        return torch.where(info == 0, factor.diagonal().sum(), m(x).mean())

    step, batches = traced(loss)
    step.check(batches, CLUSTERS)
