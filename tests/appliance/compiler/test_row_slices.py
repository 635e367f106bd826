"""Kernels that compute a row in slices: the same numbers, in less memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_steps import Traced, always_in_slices, needed_bytes, one_at_a_time, simulate
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from random_programs import traced_program
from torch import nn
from torch.nn import functional as F
from wide_steps import trained

from appliance.compiler import micro_batches as micro_batches_module
from appliance.compiler.core.errors import WaferMemoryError
from appliance.compiler.core.target import MicroBatching, Target
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.partition.row_slices import compute_in_slices
from appliance.compiler.plan_check.check import check_plan
from appliance.compiler.report.report import micro_batch_notes
from appliance.compiler.wafer_schedule import arena
from cstorch.errors import CompileError as LoweringError
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.text.parser import parse_module
from wsc.v1 import plan_pb2

SAMPLES, TOKENS, WIDTH, HEADS, KEYS = 6, 8, 8, 4, 2


def repeated(keys: torch.Tensor) -> torch.Tensor:
    """A key for each head, of those that heads share."""
    return keys.transpose(1, 2)[:, :, None].expand(-1, -1, HEADS // KEYS, -1, -1).flatten(1, 2)


class Layer(nn.Module):
    """A layer as Llama has it: rotated queries and keys, attention in which heads share keys, and a gated product.

    window: the tokens that a query sees; 0: all before it.
    """

    def __init__(self, width: int, wide: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.LayerNorm(width)])
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // HEADS * KEYS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, wide) for _ in range(2))
        self.down = nn.Linear(wide, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * 0.1
        query = self.query(x).unflatten(2, (HEADS, -1))
        key, value = (make(x).unflatten(2, (KEYS, -1)) for make in (self.key, self.value))
        query, key = (heads * angles.cos()[:, None] + heads.flip(-1) * angles.sin()[:, None] for heads in (query, key))
        query, key, value = query.transpose(1, 2), repeated(key), repeated(value)
        if self.window:
            places = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
            before = places[:, None] - places[None, :]
            hidden = (before < 0) | (before >= self.window)
            mask = torch.zeros_like(before).masked_fill(hidden, -torch.inf)
            made = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            made = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(made.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(
        self, layers: int, width: int = WIDTH, wide: int = 4 * WIDTH, words: int = 10, window: int = 0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, wide, window) for _ in range(layers))
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
def always() -> Iterator[list[str]]:
    with always_in_slices() as sliced:
        yield sliced


@pytest.mark.parity
# Of all 24, so many that every two values of two parameters occur together.
@pytest.mark.parametrize(
    ("row_slices", "window", "slices_attention", "micro_batches", "recomputes"),
    [
        (2, 0, False, 1, True),
        (2, 0, True, 2, False),
        (4, 3, False, 2, False),
        (4, 3, True, 1, True),
        (8, 0, False, 1, False),
        (8, 0, True, 2, True),
    ],
)
def test_slices_compute_what_rows_compute(
    always: list[str], row_slices: int, window: int, slices_attention: bool, micro_batches: int, recomputes: bool
) -> None:
    batches = [words() for _ in range(2)]
    settings: dict[str, Any] = {"row_slices": row_slices, "micro_batches": micro_batches, "recomputes": recomputes}
    traced(window=window).check(batches, [(1, 1), (3, 2)], slices_attention=slices_attention, **settings)
    assert always
    assert any("first_query" in text for text in always) == (slices_attention and not window)


@pytest.mark.parity
def test_layers_that_are_run_again_compute_in_slices(always: list[str]) -> None:
    with one_at_a_time(adds_in_memoryx=True, kept_every=(4, 2), keeps_weights=False):
        traced(layers=6).check(
            [words()], [(1, 1), (1, 2), (3, 3)], row_slices=4, micro_batches=2, recomputes=True, seeds=[0, 3]
        )
    assert always


class Trunks(nn.Module):
    """Two models of nine layers, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.trunks = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(9))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(trunk(x) * x).mean() for trunk in self.trunks]).sum()


@pytest.mark.parity
def test_models_of_a_list_are_divided_into_their_layers() -> None:
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    step = Traced(step_of, Trunks(), batch)
    labels = [
        {instruction.run.layer for instruction in step.plan(1, row_slices=count).wafer.instructions} for count in (1, 2)
    ]
    assert {"trunks.1", "trunks.1 backward"} < labels[0]
    assert {f"trunks.1.{number} backward" for number in range(1, 9)} < labels[1]
    assert "trunks.1 backward" not in labels[1]
    with always_in_slices() as sliced, one_at_a_time(adds_in_memoryx=True, kept_every=(3,)):
        step.check([batch], [(1, 1), (3, 2)], row_slices=2, micro_batches=2, recomputes=True)
    assert sliced


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


# --- Memory

LONG = {"tokens": 4096, "samples": 2}
MOST = 8  # slices, in tests in which as many as the compiler tries would show no more


@pytest.fixture
def few_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler tries fewer slices than otherwise: 64 take seconds, and are tried in a test without this."""
    monkeypatch.setattr(micro_batches_module, "_NUMBERS_OF_SLICES", (2, 4, MOST))


def assert_computes(plan: plan_pb2.Plan, step: Traced, size: dict[str, int]) -> None:
    """The plan computes in a step what plain torch does. size: of the batch, as of `words`."""
    batches = [words(**size)]
    outputs, states = step.expected(batches)
    simulation = simulate(plan, step.initial)
    (results,) = simulation.run([batches], 0)
    torch.testing.assert_close(list(results.values()), outputs[0], rtol=1e-9, atol=1e-9)
    for name, value in states.items():
        torch.testing.assert_close(simulation.states[name], value, rtol=1e-9, atol=1e-9)


def largest_kernel(plan: plan_pb2.Plan) -> int:
    """The bytes of the values that exist at once in a kernel, of the kernel that has the most."""
    return max(profile.working_bytes for profile in profile_kernels(plan.wafer.kernels).values())


@pytest.mark.parity
def test_a_row_that_does_not_fit_is_computed_in_slices() -> None:
    step = traced(layers=1, wide=16 * WIDTH, **LONG)
    whole = {"micro_batches": LONG["samples"], "recomputes": True}
    memory = step.plan(1, **whole).wafer.own_bytes * 5 // 10
    with pytest.raises(WaferMemoryError, match="a single row"):
        step.plan(1, wafer_memory_bytes=memory, **whole)
    for asked in (MicroBatching(), MicroBatching(size=1), MicroBatching(size=2)):
        target = Target(num_csx=1, num_shards=1, wafer_memory_bytes=memory)
        plan = compile_in_micro_batches(step.text, target, asked, lambda: pytest.fail("no time is predicted"))
        check_plan(plan)
        assert plan.wafer.row_slices > 1
        assert plan.wafer.micro_batches == LONG["samples"]
        assert "slices, one after the other" in " ".join(micro_batch_notes(plan))
    assert_computes(plan, step, LONG)


@pytest.mark.usefixtures("few_slices")
@pytest.mark.parametrize(("tokens", "why"), [(4099, "a single row of the batch needs"), (4096, "even in slices")])
def test_a_row_that_does_not_fit_in_slices_is_refused(tokens: int, why: str) -> None:
    """4,099 is a prime."""
    step = traced(layers=1, tokens=tokens, samples=2)
    memory = step.plan(1, micro_batches=2, recomputes=True).wafer.own_bytes // (10 if tokens == 4096 else 2)
    target = Target(num_csx=1, num_shards=1, wafer_memory_bytes=memory)
    with pytest.raises(WaferMemoryError, match=why):
        compile_in_micro_batches(step.text, target, MicroBatching(), lambda: pytest.fail("no time is predicted"))


def test_attention_in_slices_needs_less_memory() -> None:
    """Of what attention reads and makes, only keys and values exist whole, and once for the heads that share them."""
    step = traced(layers=1, wide=WIDTH, width=16 * WIDTH, **LONG)
    settings = {"micro_batches": 2, "recomputes": True, "row_slices": MOST}
    whole, sliced = (largest_kernel(step.plan(1, slices_attention=attends, **settings)) for attends in (False, True))
    assert sliced * 4 < whole * 3


@pytest.mark.usefixtures("few_slices")
def test_a_row_whose_attention_does_not_fit_is_computed_in_slices() -> None:
    step = traced(layers=1, wide=WIDTH, width=16 * WIDTH, **LONG)
    settings = {"micro_batches": 2, "recomputes": True, "row_slices": MOST}
    memory = step.plan(1, slices_attention=True, **settings).wafer.own_bytes * 9 // 10
    with pytest.raises(WaferMemoryError, match="even in slices"):
        step.plan(1, wafer_memory_bytes=memory, **settings)
    target = Target(num_csx=1, num_shards=1, wafer_memory_bytes=memory)
    plan = compile_in_micro_batches(step.text, target, MicroBatching(), lambda: pytest.fail("no time is predicted"))
    check_plan(plan)
    assert any("first_query" in kernel.cirh for kernel in plan.wafer.kernels)


def test_layers_whose_attention_is_in_slices_keep_as_many_outputs_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    step = traced(layers=12, tokens=1024, samples=1)
    settings = {"recomputes": True, "row_slices": 2, "slices_attention": True}
    memory, kept = step.plan(1, **settings).wafer.own_bytes * 3 // 4, []
    while True:
        try:
            plan = step.plan(1, wafer_memory_bytes=memory, **settings)
        except WaferMemoryError:
            break
        if plan.wafer.HasField("kept_at_most"):
            kept.append(plan.wafer.kept_at_most)
        if kept[-1:] == [2]:
            assert "At most 2 layers keep their outputs" in " ".join(micro_batch_notes(plan))
        # With a little less than this plan needs, another one is found.
        memory = needed_bytes(plan) * 97 // 100
    assert "No layer keeps its outputs" in " ".join(micro_batch_notes(plan))
    assert kept == sorted(kept, reverse=True)
    assert set(kept) == {3, 2, 1, 0}


def test_more_slices_need_less_memory() -> None:
    step = traced(layers=1, wide=32 * WIDTH, **LONG)
    plans = [step.plan(1, micro_batches=2, recomputes=True, row_slices=count) for count in (1, 2, 4, 16)]
    needed = [largest_kernel(plan) for plan in plans]
    assert needed == sorted(needed, reverse=True)
    # The gated product alone makes a dozen values of 32 times the width.
    assert needed[-1] * 8 < needed[0]


def test_a_mask_of_all_scores_exists_in_slices() -> None:
    step = traced(layers=1, window=64, tokens=1024, samples=2)
    one, many = (step.plan(1, micro_batches=2, recomputes=True, row_slices=count) for count in (1, 16))
    assert largest_kernel(one) > 1024 * 1024 * 8
    assert largest_kernel(many) * 8 < largest_kernel(one)


def test_logits_of_an_evaluation_exist_in_slices() -> None:
    def scored(model: Any) -> Any:
        def step(ids: torch.Tensor) -> Any:
            logits = model.head(model.embedding(ids))
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
            return [loss, (logits.argmax(2) == ids).sum()]

        return step

    torch.manual_seed(0)
    many = 1000
    step = Traced(scored, Decoder(0, words=many), words(**LONG))
    logits = LONG["tokens"] * many * 8
    assert largest_kernel(step.plan(1, micro_batches=2)) >= logits
    assert largest_kernel(step.plan(1, micro_batches=2, row_slices=16)) < logits // 4
    step.check([words(**LONG)], [(1, 1)], micro_batches=2, row_slices=16)


# --- Kernels


def test_an_operation_that_costs_little_is_repeated() -> None:
    text = """
    module {
      func @graph(%x: tensor<1x64x8xf32>, %w: tensor<8x8xf32>) -> (tensor<8x8xf32>, tensor<64x8xf32>) {
        %0 = cirh.Tanh %x : tensor<1x64x8xf32>
        %1 = cirh.Reshape %0 : (tensor<1x64x8xf32>) -> tensor<64x8xf32>
        %2 = aten.mm %1, %w : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>
        %3 = aten.cumsum %2 {dim = 0 : i64} : (tensor<64x8xf32>) -> tensor<64x8xf32>
        %4 = cirh.Add %3, %1 : tensor<64x8xf32>
        %5 = cirh.MatMul %2, %1 {transpose_a = true} : (tensor<64x8xf32>, tensor<64x8xf32>) -> tensor<8x8xf32>
        return %5, %4 : tensor<8x8xf32>, tensor<64x8xf32>
      }
    }
    """
    made = compute_in_slices(parse_module(text), {0: 1}, 5)
    assert made is not None
    # The largest number of slices that is at most five and divides 64 tokens.
    names = Counter(op.name for op in body_ops(made))
    assert (names["cirh.Tanh"], names["aten.mm"], names["aten.cumsum"]) == (2 * 4, 4, 1)
    # The product of the first slice, and those of the others, which are added to it.
    assert (names["cirh.MatMul"], names["aten.addmm"]) == (1, 3)
    x, w = torch.randn(1, 64, 8), torch.randn(8, 8)
    torch.testing.assert_close(Kernel(made)([x, w]), Kernel.build(text)([x, w]))


def test_sums_of_halves_are_computed_at_once() -> None:
    """Sums that are rounded after each slice would be less exact; those in float32 are as exact as the whole."""
    text = """
    module {
      func @graph(%x: tensor<1x64x8xbf16>, %w: tensor<8x8xbf16>) -> (tensor<8x8xbf16>, tensor<8x8xf32>) {
        %0 = cirh.Reshape %x : (tensor<1x64x8xbf16>) -> tensor<64x8xbf16>
        %1 = aten.mm %0, %w : (tensor<64x8xbf16>, tensor<8x8xbf16>) -> tensor<64x8xbf16>
        %2 = cirh.MatMul %1, %0 {transpose_a = true} : (tensor<64x8xbf16>, tensor<64x8xbf16>) -> tensor<8x8xbf16>
        %3 = cirh.MatMul %0, %1 {transpose_a = true} : (tensor<64x8xbf16>, tensor<64x8xbf16>) -> tensor<8x8xbf16>
        %4 = cirh.Cast %3 {Truncate = false} : tensor<8x8xbf16> -> tensor<8x8xf32>
        return %2, %4 : tensor<8x8xbf16>, tensor<8x8xf32>
      }
    }
    """
    made = compute_in_slices(parse_module(text), {0: 1}, 4)
    assert made is not None
    adding = [op for op in body_ops(made) if op.name == "cirh.Add"]
    assert len(adding) == 3
    assert all(types.dtype(op.results[0]) is torch.float32 for op in adding)


def test_a_kernel_without_tokens_stays_whole() -> None:
    text = """
    module {
      func @graph(%x: tensor<8xf32>) -> (tensor<8xf32>) {
        %0 = cirh.Tanh %x : tensor<8xf32>
        return %0 : tensor<8xf32>
      }
    }
    """
    assert compute_in_slices(parse_module(text), {0: 8}, 4) is None
