"""Methods of torch that read states, distributions, and masks made of constants, on simulated clusters beside torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Step, Traced
from torch import distributions, nn
from torch.nn import functional as F
from torch.optim import swa_utils

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    """Some initial weights make steps of the distributions diverge, in plain torch too."""
    torch.manual_seed(3)


Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def batches(*shape: int, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def nothing(model: nn.Module) -> None:
    pass


def trained(
    model: nn.Module, loss: Loss, more: Callable[[Any], object] = nothing, rate: float = 0.1
) -> tuple[Traced, list[torch.Tensor]]:
    """A step of gradient descent, and what comes after it."""

    def build(model: nn.Module) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            value = loss(model, x)
            value.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(rate * parameter.grad)
                        parameter.grad = None
            more(model)
            return value

        return step

    return Traced(build, model, batches(6)[0]), batches(6)


class Averaged(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.live = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
        self.average = swa_utils.AveragedModel(self.live, **settings).requires_grad_(False)


AVERAGES: dict[str, dict[str, Any]] = {
    "default": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "swa": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "ema with buffers": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "swa, one by one, with buffers": {"avg_fn": swa_utils.get_swa_avg_fn(), "use_buffers": True},
    "ema, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "swa, one by one": {"avg_fn": swa_utils.get_swa_avg_fn()},
    "own": {"avg_fn": lambda own, new, count: own * (count / (count + 2)) + new * (2 / (count + 2))},
}


@pytest.mark.parametrize("settings", AVERAGES.values(), ids=AVERAGES.keys())
def test_an_averaged_model_is_updated_in_the_step(settings: dict[str, Any]) -> None:
    model = Averaged(**settings)
    traced, data = trained(
        model,
        lambda model, x: model.live(x).square().mean(),
        lambda model: model.average.update_parameters(model.live),
    )
    traced.check(data, [(1, 1), (2, 2)])


@pytest.mark.parametrize("settings", AVERAGES.values(), ids=AVERAGES.keys())
def test_one_of_a_model_on_the_device_counts_there(settings: dict[str, Any]) -> None:
    """torch makes the count on the CPU, where a step would count once."""

    def build(model: nn.Module) -> Step:
        average = swa_utils.AveragedModel(model, **settings).requires_grad_(False)

        def step(x: torch.Tensor) -> list[torch.Tensor]:
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
            average.update_parameters(model)
            return [parameter.clone() for parameter in average.module.parameters()]

        return step

    data = batches(6)
    Traced(build, Averaged().live, data[0]).check(data, [(1, 1), (2, 2)])


NORMS: dict[int | str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    1: (nn.BatchNorm1d, (6, 5)),
    2: (nn.BatchNorm2d, (6, 3, 4)),
    3: (nn.BatchNorm3d, (6, 2, 3, 2)),
    "instances": (nn.InstanceNorm1d, (6, 5)),
}


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("rank", NORMS)
def test_running_statistics_over_all_steps(rank: int | str, affine: bool) -> None:
    norm, shape = NORMS[rank]
    model = norm(6, momentum=None, affine=affine, track_running_stats=True)

    def build(model: nn.Module) -> Step:
        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x.clone().requires_grad_()
            output = model(x)
            (gradient,) = torch.autograd.grad((output**3).sum(), x)
            return output, gradient

        return step

    data = batches(*shape)
    Traced(build, model, data[0]).check(data, [(1, 1), (3, 1)])


DISTRIBUTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "normal": lambda a, b: distributions.Normal(a, F.softplus(b)).log_prob(b),
    "kl": lambda a, b: distributions.kl_divergence(
        distributions.Normal(a, b.exp()), distributions.Normal(torch.zeros_like(a), torch.ones_like(a))
    ),
    "bernoulli": lambda a, b: distributions.Independent(distributions.Bernoulli(logits=a), 1).log_prob((b > 0).to(a)),
    "categorical": lambda a, b: distributions.Categorical(logits=a).log_prob(b.argmax(1)),
    "one-hot": lambda a, b: distributions.OneHotCategorical(logits=a).entropy(),
    "laplace": lambda a, b: distributions.Laplace(a, b.exp()).log_prob(b),
    "gamma": lambda a, b: distributions.Gamma(a.exp(), b.exp()).log_prob(a.exp() + 1),
    "beta": lambda a, b: distributions.Beta(a.exp(), b.exp()).log_prob(torch.sigmoid(b)),
    "log-normal": lambda a, b: distributions.LogNormal(a, b.exp()).log_prob(b.exp()),
    "mixture": lambda a, b: distributions.MixtureSameFamily(
        distributions.Categorical(logits=a), distributions.Normal(a, b.exp())
    ).log_prob(b.sum(1)),
    "squashed": lambda a, b: distributions.TransformedDistribution(
        distributions.Normal(a, b.exp()), [distributions.TanhTransform()]
    ).log_prob(torch.tanh(b)),
    "dirichlet": lambda a, b: distributions.Dirichlet(a.exp()).log_prob(b.softmax(1)),
    "poisson": lambda a, b: distributions.Poisson(a.exp()).log_prob((b * b).round()),
}


@pytest.mark.parametrize("of", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_distributions_validate_nothing_of_the_data(of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    traced, data = trained(nn.Linear(6, 6), lambda model, x: of(*model(x).chunk(2, 1)).mean())
    traced.check(data, [(1, 1), (2, 1)])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))


def test_a_distribution_of_weights_is_not_asked_for_their_values() -> None:
    traced, data = trained(Scaled(), lambda model, x: -distributions.Normal(model.mean, model.scale).log_prob(x).mean())
    traced.check(data, [(1, 1), (2, 1)])


def encoder(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype).to(x.device)
    return model(x.view(-1, 3, 2), mask).square().mean()


def test_a_causal_mask_without_a_hint() -> None:
    layer = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)
    traced, data = trained(nn.TransformerEncoder(layer, 2), encoder)
    traced.check(data, [(1, 1), (2, 1)])


def test_a_decoder_with_a_mask_made_on_the_device() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.full((3, 3), -torch.inf, device=x.device, dtype=x.dtype), 1)
        x = x.view(-1, 3, 2)
        return model(x, x.flip(1), tgt_mask=mask).square().mean()

    layer = nn.TransformerDecoderLayer(2, 1, 4, dropout=0.0, batch_first=True)
    traced, data = trained(nn.TransformerDecoder(layer, 2), loss)
    traced.check(data, [(1, 1), (2, 1)])


def test_a_known_mask_chooses_as_its_places_do() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scores = model(x)
        scores = torch.einsum("bi,bj->bij", scores, scores)
        others = ~torch.eye(6, dtype=torch.bool, device=x.device)
        return scores[:, others].view(-1, 6, 5).logsumexp(2).mean()

    traced, data = trained(nn.Linear(6, 6), loss)
    traced.check(data, [(1, 1), (2, 1)])


def test_a_known_mask_of_pairs_of_samples() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        z = F.normalize(model(x), dim=1)
        others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
        return (z @ z.T)[others].view(len(x), -1).logsumexp(1).mean()

    traced, data = trained(nn.Linear(6, 6), loss)
    traced.check(data, [(1, 1), (2, 1), (3, 1)])


@pytest.mark.parametrize("norm", [1.0, 2.0, torch.inf])
def test_gradients_are_clipped_as_lists_of_tensors(norm: float) -> None:
    def build(model: nn.Module) -> Step:
        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            loss = model(x).square().mean()
            loss.backward()
            parameters: list[torch.Tensor] = list(model.parameters())
            total = nn.utils.clip_grad_norm_(parameters, 0.1, norm_type=norm, foreach=True)
            nn.utils.clip_grad_value_(parameters, 0.05, foreach=True)
            with torch.no_grad():
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                torch._foreach_add_(parameters, gradients, alpha=-0.1)
                torch._foreach_mul_(parameters, 0.999)
            for parameter in parameters:
                parameter.grad = None
            return loss, total

        return step

    data = batches(6)
    Traced(build, nn.Linear(6, 6), data[0]).check(data, [(1, 1), (2, 2)])
