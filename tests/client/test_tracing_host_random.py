"""Random tensors of the CPU in a traced step: an error where one enters the step, whatever was computed from it."""

import re
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from traced_steps import trace

from cstorch.errors import TraceError

X = torch.ones(4, 3)
MADE_BEFORE = torch.rand(4, 3)
HEADS = torch.ones(1, 4, 3)


def _row_of_a_tensor(x: torch.Tensor) -> torch.Tensor:
    noise = torch.empty(4, 3)
    noise[0].uniform_()
    return x + noise.to(x.device)


ENTERING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "randn": lambda x: x + torch.randn(4, 3).to(x.device),
    "large": lambda x: x.sum() + torch.randn(50, 50).to(x.device),
    "like": lambda x: x + torch.randn_like(MADE_BEFORE).to(x.device),
    "scalar": lambda x: x * torch.rand(()),
    "scaled": lambda x: x + (torch.randn(3) * 2).to(x.device),
    "stacked": lambda x: x + torch.stack([torch.rand(3), torch.ones(3)])[0].to(x.device),
    "a mask of it": lambda x: x * (torch.rand(3) < 0.5).to(x.device),
    "normal": lambda x: x + torch.normal(0.0, torch.ones(3)).to(x.device),
    "in place": lambda x: x + torch.empty(3).uniform_().to(x.device),
    "a part in place": _row_of_a_tensor,
    "bernoulli": lambda x: x * torch.bernoulli(torch.full((3,), 0.5)).to(x.device),
    "dropout": lambda x: x * F.dropout(torch.ones(3)).to(x.device),
    "multinomial": lambda x: x + torch.multinomial(torch.ones(4), 3).to(x.device),
    "with a generator": lambda x: x + torch.randn(3, generator=torch.Generator()).to(x.device),
    "an index": lambda x: x[torch.randint(0, 4, (2,))],
    "a permutation": lambda x: x[torch.randperm(4).to(x.device)],
    "copied": lambda x: x.clone().copy_(torch.rand(4, 3)),
    "Normal": lambda x: x + torch.distributions.Normal(0.0, 1.0).sample((3,)).to(x.device),
    "Gamma": lambda x: x + torch.distributions.Gamma(torch.ones(3), torch.ones(3)).sample().to(x.device),
    "Dirichlet": lambda x: x + torch.distributions.Dirichlet(torch.ones(3)).sample().to(x.device),
    "Beta": lambda x: x * torch.distributions.Beta(1.0, 1.0).sample().to(x.device),
}

NOT_ENTERING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "on the device": lambda x: x + torch.randn(4, 3, device=x.device),
    "made before": lambda x: x + MADE_BEFORE.to(x.device),
    "decides nothing": lambda x: x * 1 if torch.rand([]) < 2 else x,  # as layers with a chance of zero to be left out
    "its shape alone": lambda x: x * torch.rand(3).numel(),
    "dropout that drops nothing": lambda x: x + F.dropout(MADE_BEFORE, training=False).to(x.device),
    "attention without dropout": lambda x: x + F.scaled_dot_product_attention(HEADS, HEADS, HEADS)[0].to(x.device),
}


@pytest.mark.parametrize("step", ENTERING.values(), ids=ENTERING)
def test_a_random_cpu_tensor_does_not_enter_a_step(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    drawn = re.escape(f"{step.__code__.co_filename.rsplit('/')[-1]}:{_drawing_line(step)},")
    with pytest.raises(TraceError, match=rf"drawn on the CPU .* at \S*{drawn} enters .*`torch.randn\(n, device="):
        trace(step, X)


def _drawing_line(step: Callable[[torch.Tensor], torch.Tensor]) -> int:
    return step.__code__.co_firstlineno + (2 if step is _row_of_a_tensor else 0)


@pytest.mark.parametrize("step", NOT_ENTERING.values(), ids=NOT_ENTERING)
def test_other_random_tensors_do_no_harm(step: Callable[[torch.Tensor], torch.Tensor]) -> None:
    trace(step, X)
