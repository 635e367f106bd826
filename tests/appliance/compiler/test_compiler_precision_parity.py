"""Mixed precision errs no more than torch's own autocast does: both are measured against float32, on the same steps.

The bound is 1.25 times autocast's error. The two round at different places, so that their errors are different draws of
much the same size: over some seeds and steps the ratio of their norms comes close to one, but not to one exactly.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Step, Traced
from plan_simulator import Simulation
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from appliance.compiler.pipeline import Half, Precision

pytestmark = pytest.mark.parity

STEPS, SEEDS, RATE = 3, 6, 0.1
BOUND = 1.25
WORDS, LENGTH, WIDTH, HEADS = 13, 8, 32, 4


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.fc2(torch.tanh(self.fc1(x)))))


class Transformer(nn.Module):
    """One block, with attention by plain products and a scale that no half holds exactly, and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        q, k, v = (
            t.view(rows, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=-1)
        )
        scores = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, torch.finfo(torch.float16).min).softmax(-1)
        return self.projection((weights @ v).transpose(1, 2).reshape(rows, LENGTH, WIDTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places
        x = x + self.attention(self.norm1(x))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return self.norm3(x) @ self.words.weight.t()


def images() -> Any:
    return torch.randn(BATCH, 64), torch.randint(10, (BATCH,))


def text() -> Any:
    words = torch.randint(WORDS, (BATCH, LENGTH + 1))
    return words[:, :-1].clone(), words[:, 1:].clone()


class Fused(Transformer):
    """The same, with torch's attention, which stays one operation."""

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        q, k, v = (
            t.view(rows, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=-1)
        )
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(made.transpose(1, 2).reshape(rows, LENGTH, WIDTH))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (Network, images),
    "transformer": (Transformer, text),
    "fused": (Fused, text),
}


def training(autocast: torch.dtype | None, scale: float = 1.0) -> Callable[[Any], Step]:
    """SGD on the cross entropy, its gradients scaled up and down again; under torch's autocast or without it."""

    def build(model: Any) -> Step:
        def step(batch: Any) -> torch.Tensor:
            inputs, labels = batch
            enter = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
            with enter:
                logits = model(inputs)
                loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
            (loss * scale).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad * (RATE / scale))
            model.zero_grad()
            return loss.detach()

        return step

    return build


@dataclass(frozen=True)
class Run:
    """The losses of some steps, and all weights after them in one vector."""

    losses: torch.Tensor
    weights: torch.Tensor


@functools.cache
def traced(case: str, scale: float) -> Traced:
    model, batch = CASES[case]
    return Traced(training(None, scale), model(), batch(), double=False)


@functools.cache
def start(case: str, seed: int) -> tuple[nn.Module, list[Any]]:
    """Another network, with other batches, for each seed."""
    torch.manual_seed(seed)
    model, batch = CASES[case]
    return model(), [batch() for _ in range(STEPS)]


@functools.cache
def plain(case: str, autocast: torch.dtype | None, scale: float) -> list[Run]:
    """What torch makes of each seed."""
    runs = []
    for seed in range(SEEDS):
        network, batches = start(case, seed)
        network = copy.deepcopy(network)
        step = training(autocast, scale)(network)
        losses = [step(batch) for batch in batches]
        runs.append(_run(losses, {f"state.model.{name}": p.detach() for name, p in network.named_parameters()}))
    return runs


def simulated(case: str, precision: Precision, wafers: int, scale: float) -> list[Run]:
    """What a simulated cluster makes of each seed."""
    simulation = Simulation(traced(case, scale).plan(wafers, 2, precision=precision), traced(case, scale).initial)
    runs = []
    for seed in range(SEEDS):
        network, batches = start(case, seed)
        simulation.states = {f"state.model.{name}": p.detach() for name, p in network.named_parameters()}
        outputs = simulation.run([tree_leaves(batch) for batch in batches], 1)
        runs.append(_run([value for output in outputs for value in output.values()], simulation.states))
    return runs


def _run(losses: list[torch.Tensor], states: Mapping[str, torch.Tensor]) -> Run:
    assert {value.dtype for value in (*losses, *states.values())} == {torch.float32}
    return Run(torch.stack(losses), torch.cat([states[name].reshape(-1) for name in sorted(states)]))


def error(runs: list[Run], exact: list[Run]) -> tuple[float, float]:
    """The error of losses, and that of all weights, in the Euclidean norm over everything."""
    losses = torch.stack([a.losses - b.losses for a, b in zip(runs, exact, strict=True)])
    weights = torch.stack([a.weights - b.weights for a, b in zip(runs, exact, strict=True)])
    return float(losses.norm()), float(weights.norm())


@pytest.mark.parametrize("wafers", [1, 2])
@pytest.mark.parametrize(
    ("half", "level"),
    [(Half.BFLOAT16, 0), (Half.BFLOAT16, 1), (Half.BFLOAT16, 2), (Half.FLOAT16, 1)],
    ids=lambda value: str(getattr(value, "value", value)),
)
@pytest.mark.parametrize("case", CASES)
def test_errors_are_within_those_of_autocast(case: str, half: Half, level: int, wafers: int) -> None:
    scale = 1024.0 if half is Half.FLOAT16 else 1.0
    exact, autocast = (plain(case, dtype, scale) for dtype in (None, getattr(torch, half.value)))
    ours = simulated(case, Precision(half=half, level=level), wafers, scale)
    (losses, weights), (allowed_losses, allowed_weights) = error(ours, exact), error(autocast, exact)
    assert 0 < losses <= BOUND * allowed_losses
    assert 0 < weights <= BOUND * allowed_weights
