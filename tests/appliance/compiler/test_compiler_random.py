"""Random steps: the same on every number of wafers, and as plain torch with the same numbers."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, RandomTraced, Traced, loss_and_gradients
from plan_simulator import Simulation
from torch import nn
from torch.nn import functional as F

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import Half, Precision
from appliance.compiler.pipeline import Target, compile_module
from cstorch._internal.tracing import COUNTER, random_counter
from cstorch._internal.tracing.rewrites import distributions
from cstorch._internal.tracing.truncated_normal import truncated_normal_
from waferbox.cirh.modules.builder import WAFERS

pytestmark = pytest.mark.parity

G = torch.Generator().manual_seed(4)
X = torch.randn(BATCH, 6, generator=G, dtype=torch.float64)
SEQUENCES = torch.randn(BATCH, 5, 8, generator=G, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


def trained(model: Any, loss: Callable[[Any], Any]) -> Any:
    def step(x: Any) -> Any:
        result = loss(model(x))
        result.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        return result.detach()

    return step


class Dropped(nn.Module):
    """Dropout before and behind weights, and whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.3)
        self.channels = nn.Dropout1d(0.5)

    def forward(self, x: Any) -> Any:
        hidden = self.dropout(torch.relu(self.first(self.dropout(x))))
        return self.second(self.channels(hidden.view(-1, 4, 4)).view(-1, 16))


def test_training_with_dropout() -> None:
    traced = RandomTraced(lambda m: trained(m, lambda y: y.pow(2).mean()), Dropped(), X)
    traced.check([X, X + 1, X * 2], seeds=(0, 1))


class Attention(nn.Module):
    """Attention with dropout on its weights, written for the layout of its batches."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Any) -> Any:
        return self.layer(x if self.batch_first else x.transpose(0, 1))


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_in_both_layouts(batch_first: bool) -> None:
    """Time first, a wafer's samples are columns of the whole mask."""
    traced = RandomTraced(lambda m: trained(m, lambda y: y.pow(2).mean()), Attention(batch_first), SEQUENCES)
    traced.check([SEQUENCES, -SEQUENCES], [(1, 1), (2, 2), (3, 1), (4, 1)])


STEPS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda x: x + torch.rand_like(x),
    "normal": lambda x: x * torch.randn(BATCH, 6, dtype=x.dtype, device=x.device),
    "in place": lambda x: x + torch.empty_like(x).uniform_(-1, 2) * torch.empty_like(x).normal_(1, 2),
    "probabilities": lambda x: torch.bernoulli(x.sigmoid()),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "integers": lambda x: x + torch.randint(-5, 5, (BATCH, 1), device=x.device),
    "of all samples": lambda x: x + torch.rand(6, dtype=x.dtype, device=x.device),
    "whole and in parts": lambda x: _whole_and_in_parts(x),
    "of some columns": lambda x: x[:, 1:4] * torch.rand(BATCH, 3, dtype=x.dtype, device=x.device),
    "drop path": lambda x: x * x.new_empty(BATCH, 1).bernoulli_(0.5),
}


def _whole_and_in_parts(x: Any) -> Any:
    noise = torch.rand(BATCH, 6, dtype=x.dtype, device=x.device)
    return x + noise, noise.sum(), noise


@pytest.mark.parametrize("name", STEPS)
def test_numbers_meet_samples(name: str) -> None:
    RandomTraced(lambda m: STEPS[name], nn.Identity(), X).check([X, X])


DISTRIBUTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "poisson": lambda forms, x: forms.get(torch.poisson, torch.poisson)(x.abs() * 9),
    "binomial": lambda forms, x: forms.get(torch.binomial, torch.binomial)((x.abs() * 40).floor(), x.sigmoid()),
    "gamma": lambda forms, x: forms.get(torch._standard_gamma, torch._standard_gamma)(x.exp()),
    "dirichlet": lambda forms, x: forms.get(torch._sample_dirichlet, torch._sample_dirichlet)(x.exp()),
    "cauchy": lambda forms, x: forms.get(torch.Tensor.cauchy_, torch.Tensor.cauchy_)(torch.empty_like(x), 1, 2),
    "geometric": lambda forms, x: forms.get(torch.Tensor.geometric_, torch.Tensor.geometric_)(torch.empty_like(x), 0.2),
    "log normal": lambda forms, x: forms.get(torch.Tensor.log_normal_, torch.Tensor.log_normal_)(torch.empty_like(x)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_numbers_of_distributions(name: str) -> None:
    """As on the CPU with the same uniform and normal numbers, of which the forms make them."""
    traced = RandomTraced(lambda m: lambda x: DISTRIBUTIONS[name]({}, x), nn.Identity(), X)
    traced.build = lambda m: lambda x: DISTRIBUTIONS[name](distributions.FORMS, x)
    traced.check([X, X])


def test_truncated_normal_numbers_of_a_step() -> None:
    traced = RandomTraced(lambda m: lambda x: nn.init.trunc_normal_(torch.empty_like(x), 1, 2, 2, 9), nn.Identity(), X)
    traced.build = lambda m: lambda x: truncated_normal_(torch.empty_like(x), 1, 2, 2, 9)
    traced.check([X, X])


def test_gradients_pass_numbers_of_distributions() -> None:
    """As on the CPU where the forms take the place of torch's functions."""

    def step(model: Any, x: Any) -> Any:
        outputs = model(x).exp()
        gamma = torch.distributions.Gamma(outputs[:, 0], outputs[:, 1]).rsample()
        shares = torch.distributions.Dirichlet(outputs[:, 1:]).rsample()
        return loss_and_gradients(model, gamma.square().mean() + shares.square().mean())

    def plain(model: Any) -> Any:
        def run(x: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "_standard_gamma", distributions.standard_gamma)
                patch.setattr(torch, "_sample_dirichlet", distributions.sample_dirichlet)
                return step(model, x)

        return run

    traced = RandomTraced(lambda m: functools.partial(step, m), nn.Linear(6, 4), X)
    traced.build = plain
    traced.check([X, -X])


def test_masks_are_equal_to_the_bit_and_of_their_step_operation_and_seed() -> None:
    def step(x: Any) -> Any:
        return F.dropout(torch.ones_like(x), 0.5) > 0, F.dropout(torch.ones_like(x), 0.5) > 0

    def masks(wafers: int) -> list[torch.Tensor]:
        simulation = Simulation(traced.plan(wafers), traced.initial)
        return [mask for outputs in simulation.run([[X], [X]]) for mask in outputs.values()]

    traced = Traced(lambda m: step, nn.Identity(), X)
    expected = masks(1)
    assert all(0 < int(mask.sum()) < mask.numel() for mask in expected)
    assert all(not a.equal(b) for i, a in enumerate(expected) for b in expected[:i])
    for wafers in (2, 3, 4):
        assert all(a.equal(b) for a, b in zip(masks(wafers), expected, strict=True))
    torch.manual_seed(12)
    traced = Traced(lambda m: step, nn.Identity(), X)
    assert all(not a.equal(b) for a, b in zip(masks(2), expected, strict=True))


def test_mixed_precision_drops_the_same() -> None:
    def step(x: Any) -> Any:
        return F.dropout(torch.relu(x @ x.new_ones(6, 6)) + 1, 0.5)

    traced = Traced(lambda m: step, nn.Identity(), X.float(), double=False)
    precision = Precision(half=Half.BFLOAT16)
    exact = Simulation(traced.plan(1), traced.initial).run([[X.float()]])[0]["output_0"]
    for wafers in (1, 3):
        half = Simulation(traced.plan(wafers, precision=precision), traced.initial).run([[X.float()]])[0]["output_0"]
        assert (half > 0).equal(exact > 0)
        torch.testing.assert_close(half, exact, rtol=2e-2, atol=0)


def test_steps_go_on_where_the_last_ones_stopped() -> None:
    traced = RandomTraced(lambda m: trained(m, lambda y: y.pow(2).mean()), Dropped(), X)
    begun = Simulation(traced.plan(2), traced.initial)
    begun.run([[X], [X]])
    assert begun.states[COUNTER] == traced.initial[COUNTER] + 2
    going_on = Simulation(traced.plan(3, 2), begun.states)
    going_on.run([[X]])
    _, states = traced.expected([X, X, X])
    for name, value in states.items():
        torch.testing.assert_close(going_on.states[name], value, rtol=1e-9, atol=1e-12)


def test_evaluation_draws_nothing() -> None:
    traced = Traced(lambda m: lambda x: m(x).sum().detach(), Dropped().eval(), X)
    assert COUNTER not in traced.initial
    assert "Random" not in traced.text
    traced = Traced(lambda m: lambda x: m(x).sum().detach(), Attention(True).eval(), SEQUENCES)
    assert COUNTER not in traced.initial


def test_noise_on_weights_and_its_shards() -> None:
    """What MemoryX draws is the same on every shard."""

    def build(model: Any) -> Any:
        def step(x: Any) -> Any:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
            return model(x).sum().detach(), torch.rand(3, dtype=x.dtype, device=x.device)

        return step

    RandomTraced(build, nn.Linear(6, 4), X).check([X, X])


def test_recomputed_layers_drop_the_same() -> None:
    def build(model: Any) -> Any:
        def forward(x: Any) -> Any:
            hidden = torch.utils.checkpoint.checkpoint(model.first, x, use_reentrant=False)
            return torch.utils.checkpoint.checkpoint(model.second, hidden, use_reentrant=False)

        def step(x: Any) -> Any:
            loss = forward(x).pow(2).mean()
            loss.backward()
            return loss.detach(), [parameter.grad for parameter in model.parameters()]

        return step

    def plain(model: Any) -> Any:
        def step(x: Any) -> Any:
            loss = model.second(model.first(x)).pow(2).mean()
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            return loss.detach(), gradients

        return step

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
            self.second = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6))

    traced = RandomTraced(build, Halves(), X)
    traced.build = plain
    traced.check([X, X], [(1, 1), (2, 1)])


def test_equal_layers_share_kernels() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)) for _ in range(6)))

    def build(model: Any) -> Any:
        def step(x: Any) -> Any:
            loss = model(x).sum()
            loss.backward()
            return loss.detach(), [parameter.grad for parameter in model.parameters()]

        return step

    traced = RandomTraced(build, model, X)
    assert len(traced.plan(2).wafer.kernels) <= 8  # as many as without dropout, and one that makes keys
    traced.check([X], [(1, 1), (3, 1)])


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x + torch.arange(BATCH, device=x.device)[:, None],
        lambda x: x.t() * torch.arange(BATCH, device=x.device).pow(2),
        lambda x: x + torch.eye(BATCH, device=x.device)[:, :6],
        lambda x: x + torch.arange(BATCH * 6, device=x.device).view(BATCH, 6),
        lambda x: torch.cat([x, x]) + torch.arange(2 * BATCH, device=x.device)[:, None],
        lambda x: x + torch.tensor([[3.0, -1.0] * (BATCH // 2)], device=x.device).t(),
    ],
)
def test_numbers_of_samples_are_local(step: Any) -> None:
    """A value that is whole and has an element for each sample: each wafer takes its own."""
    Traced(lambda m: step, nn.Identity(), X).check([X, X])


def test_a_state_with_an_element_for_each_sample() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.randn(BATCH, 6, generator=G))

    Traced(lambda m: lambda x: (x * m.kept).sum(1), Kept(), X).check([X])


def test_wafer_numbers_of_a_foreign_module_are_checked() -> None:
    text = Traced(lambda m: lambda x: x * 2, nn.Identity(), X).text
    extra = text.replace("@graph(", f"@graph(%w: tensor<3xi64> {{{WAFERS} = 3 : i64}}, ", 1)
    compile_module(extra, Target(num_csx=3, num_shards=1))
    with pytest.raises(CompileError, match=r"wafer numbers are not tensor<2xi64>"):
        compile_module(extra, Target(num_csx=2, num_shards=1))


def test_the_seed_of_torch_begins_the_counter() -> None:
    torch.manual_seed(1)
    first = random_counter.tensor().cpu()
    assert random_counter.tensor().cpu() == first
    torch.manual_seed(2)
    assert random_counter.tensor().cpu() != first
    torch.manual_seed(1)
    assert random_counter.tensor().cpu() == first
