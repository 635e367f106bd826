"""Kernels that compute a row in slices: the same numbers, in less memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import Traced, one_at_a_time
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from random_programs import traced_program
from torch import nn
from torch.nn import functional as F
from wide_steps import trained

from appliance.compiler.partition.row_slices import compute_in_slices
from appliance.compiler.wafer_schedule import schedule as schedule_module
from cstorch.errors import CompileError as LoweringError
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

SAMPLES, TOKENS, WIDTH, HEADS = 6, 8, 8, 2


class Layer(nn.Module):
    """A layer as Llama has it: rotated queries and keys, attention in which heads share keys, and a gated product."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.LayerNorm(width)])
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // HEADS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, wide) for _ in range(2))
        self.down = nn.Linear(wide, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * 0.1
        query = self.query(x).unflatten(2, (HEADS, -1))
        key = self.key(x).unflatten(2, (1, -1))
        value = self.value(x).unflatten(2, (1, -1)).expand(-1, -1, HEADS, -1)
        query, key = (heads * angles.cos()[:, None] + heads.flip(-1) * angles.sin()[:, None] for heads in (query, key))
        heads = [each.transpose(1, 2) for each in (query, key.expand(-1, -1, HEADS, -1), value)]
        return self.output(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int = WIDTH, wide: int = 4 * WIDTH, words: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, wide) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def step_of(model: Any) -> Any:
    return lambda ids: trained(model, model(ids))


def words(samples: int = SAMPLES, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, 10, (samples, tokens))


def traced(layers: int = 2, *, samples: int = SAMPLES, tokens: int = TOKENS, **sizes: int) -> Traced:
    torch.manual_seed(0)
    return Traced(step_of, Decoder(layers, **sizes), words(samples, tokens))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels are computed in slices also where this needs more memory. The texts of those that are."""
    sliced: list[str] = []

    def in_slices(text: str, rows: tuple[int, ...], most: int) -> str:
        made = compute_in_slices(parse_module(text), rows, most)
        if made is None:
            return text
        sliced.append(print_module(made, locations=False))
        return sliced[-1]

    monkeypatch.setattr(schedule_module, "_in_slices", in_slices)
    return sliced


@pytest.mark.parity
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("row_slices", [2, 4, 8])
def test_slices_compute_what_rows_compute(
    always: list[str], row_slices: int, micro_batches: int, recomputes: bool
) -> None:
    batches = [words() for _ in range(2)]
    settings = {"row_slices": row_slices, "micro_batches": micro_batches, "recomputes": recomputes}
    traced().check(batches, [(1, 1), (3, 2)], **settings)
    assert always


@pytest.mark.parity
def test_layers_that_are_run_again_compute_in_slices(always: list[str]) -> None:
    with one_at_a_time(adds_in_memoryx=True, kept_every=(4, 2)):
        traced(layers=6).check(
            [words()], [(1, 1), (1, 2), (3, 3)], row_slices=4, micro_batches=2, recomputes=True, seeds=[0, 3]
        )
    assert always


def random_programs(test: Callable[..., None]) -> Callable[[], None]:
    """Runs a test with 60 random programs, always the same."""
    drawn = given(
        st.integers(0, 1 << 20), st.sampled_from([(1, 1), (1, 2), (2, 3)]), st.sampled_from([2, 3, 12]), st.booleans()
    )(test)
    checks = [HealthCheck.function_scoped_fixture, *HealthCheck]
    return seed(1)(settings(max_examples=60, database=None, suppress_health_check=checks)(drawn))


@pytest.mark.parity
@pytest.mark.usefixtures("always")
@random_programs
def test_random_programs_in_slices(number: int, cut: tuple[int, int], row_slices: int, recomputes: bool) -> None:
    wafers, micro_batches = cut
    try:
        program, batch = traced_program(number)
    except LoweringError:
        reject()
    settings = {"micro_batches": micro_batches, "row_slices": row_slices, "recomputes": recomputes}
    program.check([batch], [(wafers, 1 + number % 2)], seeds=[number % 5], **settings)
