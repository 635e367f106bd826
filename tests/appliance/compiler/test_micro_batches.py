"""Into how many micro-batches a batch is divided, and what is said of it."""

import copy
import functools
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_steps import Traced
from reported_steps import memory_of
from torch import nn

from appliance.compiler import plan
from appliance.compiler.core.errors import CompileError, WaferMemoryError
from appliance.compiler.core.target import MicroBatching
from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.pipeline import STAGES, CompiledStep, Target
from appliance.compiler.plan_check.check import check_plan
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.report import micro_batch_notes, micro_batch_warnings
from waferbox.runtime.loops import in_order
from wsc.v1 import plan_pb2

ROWS, WIDTH, LAYERS = 768, 16, 12
MACHINE = MachineModel(
    source="a test",
    float32_flops_per_second=1e10,
    half_flops_per_second=1e10,
    bytes_per_second=1e9,
    stream_bytes_per_second=1e9,
    operation_seconds=1e-5,
    message_seconds=1e-5,
)


class Deep(nn.Module):
    """Small weights, and many activations."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH) if normalised else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)))
        return x.square().mean()


def traced_deep(normalised: bool, rows: int = ROWS) -> Traced:
    def build(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    torch.manual_seed(0)
    return Traced(
        build,
        Deep(normalised),
        torch.randn(rows, WIDTH, dtype=torch.float64 if normalised else None),
        double=normalised,
    )


@pytest.fixture(scope="module")
def deep() -> Traced:
    return traced_deep(normalised=False)


@pytest.fixture(scope="module")
def plan_of_single_rows(deep: Traced) -> plan_pb2.Plan:
    return compiled(deep.text, MicroBatching(size=1))


def compiled(text: str, asked: MicroBatching | None, memory: int = 1 << 30, wafers: int = 1) -> plan_pb2.Plan:
    target = Target(num_csx=wafers, num_shards=1, wafer_memory_bytes=memory)
    plan = compile_in_micro_batches(text, target, asked, lambda: MACHINE)
    check_plan(plan)
    return plan


def streamed(plan: plan_pb2.Plan) -> int:
    sizes = {group.id: group.nbytes for group in plan.wafer.groups if group.kind == plan_pb2.GROUP_KIND_WEIGHTS}
    instructions = in_order(plan.wafer.instructions, plan.wafer.loop)
    return sum(sizes.get(instruction.receive.group, 0) for instruction, _ in instructions)


@functools.cache
def needed(text: str) -> int:
    """The least memory with which a wafer computes all its rows at once."""
    return memory_of(make_report(compiled(text, None), "key", MACHINE)).peak.total_bytes


def test_a_size_is_taken_and_for_one_that_does_not_divide_the_rows_the_next_below(deep: Traced) -> None:
    assert compiled(deep.text, None).wafer.micro_batches == 1
    assert compiled(deep.text, MicroBatching(size=192)).wafer.micro_batches == 4
    assert compiled(deep.text, MicroBatching(size=192), wafers=2).wafer.micro_batches == 2
    plan = compiled(deep.text, MicroBatching(size=50), wafers=2)
    assert plan.wafer.micro_batches == 8
    why = "it does not divide the 384 rows that a wafer has; 48 rows are taken instead"
    assert micro_batch_warnings(plan) == [f"micro_batch_size=50 cannot be taken: {why}"]


@pytest.mark.parity
def test_activations_of_eight_times_the_memory_are_divided(deep: Traced) -> None:
    everything = needed(deep.text)
    memory = everything // 8
    with pytest.raises(WaferMemoryError, match=r"use micro-batches of at most about \d+ rows"):
        compiled(deep.text, None, memory)
    plan = compiled(deep.text, MicroBatching(), memory)
    rows = ROWS // plan.wafer.micro_batches
    assert plan.wafer.micro_batches > 8
    assert plan.wafer.own_bytes <= memory
    larger = min(size for size in range(rows + 1, ROWS + 1) if ROWS % size == 0)
    target = Target(num_csx=1, num_shards=1, micro_batches=ROWS // larger, wafer_memory_bytes=memory)
    with pytest.raises(WaferMemoryError):
        CompiledStep(deep.text).plan(target)
    assert compiled(deep.text, MicroBatching(size=larger), memory).wafer.recomputes
    (note,) = micro_batch_notes(plan)
    assert f"{plan.wafer.micro_batches} micro-batches of {rows}" in note
    deep.check([torch.randn(ROWS, WIDTH)], [(1, 1)], rtol=1e-5, micro_batches=ROWS // rows, wafer_memory_bytes=memory)


@pytest.mark.parametrize("largest", [0, 1, 96, 384])
def test_the_largest_size_is_found_whatever_refusals_estimate(
    deep: Traced, plan_of_single_rows: plan_pb2.Plan, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = copy.deepcopy(plan_of_single_rows)

    def fit(step: CompiledStep, target: Target) -> Any:
        rows = ROWS // target.micro_batches
        if rows > largest:
            raise WaferMemoryError(f"{rows} rows are too many", fitting_share=0)
        plan.wafer.micro_batches = target.micro_batches
        return SimpleNamespace(plan=plan)

    monkeypatch.setattr(CompiledStep, "fit", fit)
    target = Target(num_csx=1, num_shards=1)
    if not largest:
        with pytest.raises(WaferMemoryError, match="1 rows are too many"):
            compile_in_micro_batches(deep.text, target, MicroBatching(), lambda: MACHINE)
    else:
        found = compile_in_micro_batches(deep.text, target, MicroBatching(), lambda: MACHINE)
        assert found.wafer.micro_batches == ROWS // largest


@pytest.mark.parametrize(
    ("largest", "share", "sizes"),
    [
        # Where nothing fits by the estimate, single rows are tried next, then in slices, and at last in sublayers, too.
        (0, 0, [8, 8, 1, 1, 1, 1]),
        (1, 0, [8, 8, 1, 1, 4, 3, 2]),
        (4, 0, [8, 8, 1, 1, 4, 6]),
        (6, 1, [8, 8, 6, 4, 3, 2, 1, 6]),
    ],
)
def test_below_a_size_only_those_are_tried_that_refusals_do_not_exclude(
    deep: Traced,
    plan_of_single_rows: plan_pb2.Plan,
    largest: int,
    share: float,
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = copy.deepcopy(plan_of_single_rows)
    tried: list[int] = []

    def fit(step: CompiledStep, target: Target) -> Any:
        rows = ROWS // target.micro_batches
        tried.append(rows)
        if rows > largest or not target.recomputes:
            raise WaferMemoryError(f"{rows} rows are too many", fitting_share=share)
        plan.wafer.micro_batches = target.micro_batches
        return SimpleNamespace(plan=plan)

    monkeypatch.setattr(CompiledStep, "fit", fit)
    with nullcontext() if largest else pytest.raises(WaferMemoryError):
        compile_in_micro_batches(deep.text, Target(num_csx=1, num_shards=1), MicroBatching(size=8), lambda: MACHINE)
    assert tried == sizes


def test_a_size_that_does_not_fit_is_replaced_by_the_largest_below_that_does(deep: Traced) -> None:
    plan = compiled(deep.text, MicroBatching(size=ROWS), needed(deep.text) // 8)
    assert 8 < plan.wafer.micro_batches < ROWS
    rows = ROWS // plan.wafer.micro_batches
    (warning,) = micro_batch_warnings(plan)
    taken = rf"micro_batch_size={ROWS} cannot be taken: the step needs .*; {rows} rows are taken instead"
    assert re.fullmatch(taken, warning)
    assert f"micro-batches of {rows}" in micro_batch_notes(plan)[0]
    with pytest.raises(WaferMemoryError):
        compiled(deep.text, MicroBatching(size=ROWS), 1 << 12)


def test_stages_have_texts_of_the_plan_alone_not_of_targets_that_were_refused(deep: Traced) -> None:
    target = Target(num_csx=1, num_shards=1, wafer_memory_bytes=needed(deep.text) // 8)
    step = CompiledStep(deep.text)
    texts: list[Any] = []
    with pytest.raises(WaferMemoryError):
        step.plan(target, lambda name, _: texts.append(name))
    assert not texts
    compile_in_micro_batches(
        deep.text, target, MicroBatching(size=ROWS), lambda: MACHINE, lambda *text: texts.append(text)
    )
    stages = [name.split("-", 1)[1] for name, _ in texts]
    assert stages[-len(STAGES) :] == list(STAGES)
    assert not set(stages[: -len(STAGES)]) & set(STAGES)


def test_a_number_of_micro_batches_that_would_take_too_many_rounds(
    deep: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MOST_ROUNDS", 2)
    memory = needed(deep.text) // 8
    with pytest.raises(WaferMemoryError):
        CompiledStep(deep.text).plan(Target(num_csx=1, num_shards=1, micro_batches=3, wafer_memory_bytes=memory))
    assert compiled(deep.text, MicroBatching(size=ROWS // 3), memory).wafer.recomputes


def test_a_target_that_was_refused_is_planned_as_if_it_had_not_been(deep: Traced) -> None:
    step, fresh = CompiledStep(deep.text), CompiledStep(deep.text)
    memory = 151_000  # between what the two targets need
    target = Target(num_csx=1, num_shards=1, micro_batches=8, wafer_memory_bytes=memory)
    recomputing = replace(target, recomputes=True)
    for _ in range(2):
        with pytest.raises(WaferMemoryError):
            step.plan(target)
        assert step.plan(recomputing) == fresh.plan(recomputing)


def test_what_fits_is_not_divided(deep: Traced) -> None:
    plan = compiled(deep.text, MicroBatching())
    assert (plan.wafer.micro_batches, plan.wafer.micro_batches_at_once) == (1, 1)
    assert micro_batch_notes(plan) == []


def test_weights_are_streamed_as_seldom_as_memory_allows(deep: Traced) -> None:
    """With room for all, each layer's weights come once for all micro-batches; with less, more often."""
    roomy = compiled(deep.text, MicroBatching(size=96))
    kept = streamed(roomy)
    assert roomy.wafer.micro_batches_at_once == 8
    assert "layer by layer" in micro_batch_notes(roomy)[0]
    tight = compiled(deep.text, MicroBatching(size=96), memory=needed(deep.text) // 3)
    at_once = tight.wafer.micro_batches_at_once
    assert 1 <= at_once < 8
    # With room they stay until the backward pass. With less, what is read again comes twice each time, and all a little
    # less often where one time through the layers ends and the next one begins.
    assert 0.9 * 8 / at_once <= streamed(tight) / kept <= 2 * 8 / at_once
    assert f"{at_once} at a time" in micro_batch_notes(tight)[0]


@pytest.mark.parity
def test_statistics_of_the_batch_are_not_those_of_a_micro_batch() -> None:
    rows = ROWS // 32  # fewer sizes are refused one after the other
    normalised = traced_deep(normalised=True, rows=rows)
    normalised.check([torch.randn(rows, WIDTH, dtype=torch.float64)], [(2, 1)], micro_batches=4)
    memory = needed(normalised.text) // 4
    with pytest.raises(WaferMemoryError, match="micro-batches do not help, as the statistics of the whole batch"):
        compiled(normalised.text, MicroBatching(), memory)


def test_all_sizes_are_explored_within_bounds(deep: Traced) -> None:
    plan = compiled(deep.text, MicroBatching(explore=True, min_size=96, max_size=384), memory=needed(deep.text) // 2)
    tried = {each.size: each for each in plan.explored}
    assert list(tried) == [384, 256, 192, 128, 96]
    rates = {size: each.rows_per_second for size, each in tried.items() if not each.refusal}
    assert ROWS // plan.wafer.micro_batches == max(rates, key=lambda size: rates[size])
    notes = micro_batch_notes(plan)
    assert len(notes) == 6
    assert re.fullmatch(r"micro_batch_size=96: [\d,]+ rows/s predicted, [\d.]+ [KM]iB of a wafer's memory", notes[4])
    with pytest.raises(CompileError, match="no micro-batch size from 5 to 5 can be compiled, as none divides"):
        compiled(deep.text, MicroBatching(explore=True, min_size=5, max_size=5))
    with pytest.raises(CompileError, match=r"from 768 to 768 can be compiled: 768 rows: the step needs"):
        compiled(deep.text, MicroBatching(explore=True, min_size=768), memory=needed(deep.text) // 8)
