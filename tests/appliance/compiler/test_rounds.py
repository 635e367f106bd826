"""A wafer that goes through a step in rounds: gradients that MemoryX adds, and activations that are computed again."""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Traced, kinds, needed_bytes, one_at_a_time, simulate
from torch import nn
from torch.nn import functional as F
from wide_steps import WIDE, Wide, mean_step, rows, sgd, trained

from appliance.compiler import plan
from appliance.compiler.core.errors import WaferMemoryError
from appliance.compiler.core.target import MicroBatching, Target
from appliance.compiler.micro_batches import compile_in_micro_batches
from appliance.compiler.partition.layers import BACKWARD
from appliance.compiler.pipeline import CompiledStep
from appliance.compiler.plan_check.check import PlanError, check_plan
from appliance.compiler.report.report import micro_batch_notes
from appliance.compiler.wafer_schedule import arena, streams
from waferbox.links.frame import INLINE_BYTES
from waferbox.runtime.loops import with_times
from wsc.v1 import plan_pb2

CLUSTERS = [(1, 1), (1, 2), (3, 3)]
MICRO_BATCHES = 4


class Deep(nn.Module):
    """Layers with activations of several kinds, of which each keeps more than it reads."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDE), nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def clipped_step(model: Any) -> Any:
    """Reads all gradients before the first update."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        sgd(model.parameters())
        return loss.detach() + norm

    return step


@functools.cache
def deep(layers: int = 3, batch: int = BATCH) -> Traced:
    torch.manual_seed(0)
    return Traced(mean_step, Deep(layers), torch.randn(batch, WIDE, dtype=torch.float64))


def additions(plan: plan_pb2.Plan) -> int:
    parts = (with_times(part.instructions, part.loop) for part in plan.memoryx)
    return sum(times for part in parts for i, times in part if i.receive.adds_to)


@functools.cache
def wide(step: Any) -> Traced:
    return Traced(step, Wide(layers=2, state=False), rows()[0])


@pytest.mark.parity
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("step", [mean_step, clipped_step])
def test_gradients_of_rounds_are_those_of_the_batch(step: Any, recomputes: bool) -> None:
    traced = wide(step)
    with one_at_a_time(adds_in_memoryx=True):
        assert additions(traced.plan(1, micro_batches=MICRO_BATCHES)) >= 2 * (MICRO_BATCHES - 1)
        traced.check(rows(), CLUSTERS, seeds=[0, 3, 7], micro_batches=MICRO_BATCHES, recomputes=recomputes)


class Scaled(nn.Module):
    """Layers with a weight, and with many small parameters: together more than a message may have in its frame."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(layers))
        self.scales = nn.ParameterList(torch.ones(500) for _ in range(20 * layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            for scale in self.scales[20 * number : 20 * number + 20]:
                x = x * scale[:WIDE]
        return x


def test_small_gradients_do_not_hold_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is written in the first round and sent in the last would lie beside all others."""
    layers = 6
    traced = Traced(mean_step, Scaled(layers), rows()[0])
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    with one_at_a_time(adds_in_memoryx=True):
        monkeypatch.setattr(streams, "INLINE_BYTES", INLINE_BYTES)
        (plan,) = traced.check(rows(), [(1, 1)], micro_batches=MICRO_BATCHES)
    assert additions(plan) == layers * (MICRO_BATCHES - 1)
    assert plan.wafer.arena.nbytes < 3 * WIDE * WIDE * 8


@pytest.mark.parity
def test_what_is_computed_again_is_what_was_computed() -> None:
    traced = deep()
    again, *_ = traced.check(rows(), CLUSTERS, recomputes=True)
    kept = traced.plan(1)
    assert again.wafer.recomputes
    assert kept.wafer.flops < again.wafer.flops < 1.4 * kept.wafer.flops
    assert again.wafer.own_bytes < kept.wafer.own_bytes


def num_again(plan: plan_pb2.Plan) -> int:
    """The number of runs that make what an earlier one has made."""
    runs = [instruction.run for instruction in plan.wafer.instructions if instruction.HasField("run")]
    made = Counter((run.outputs[0], run.micro_batch) for run in runs)
    return made.total() - len(made)


@pytest.mark.parity
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("recomputes", [False, True])
def test_layers_that_are_run_again_make_what_they_made(micro_batches: int, recomputes: bool) -> None:
    traced = deep(layers=7)
    settings = {"micro_batches": micro_batches, "recomputes": recomputes}
    with one_at_a_time(adds_in_memoryx=micro_batches > 1):
        kept = traced.plan(1, **settings)
    with one_at_a_time(adds_in_memoryx=micro_batches > 1, kept_every=(3,)):
        again, *_ = traced.check(rows(), CLUSTERS, seeds=[0, 3], **settings)
    # Layers 0 to 2, 3 to 5 and 6: the last of each group is not run again.
    assert num_again(again) == 4 * micro_batches
    assert num_again(kept) == 0
    assert again.wafer.own_bytes < kept.wafer.own_bytes


@pytest.mark.parity
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("kept", "times"), [(1, 14), (2, 11), (3, 6), (5, 4)])
def test_so_many_layers_keep_their_outputs_at_most(kept: int, times: int, micro_batches: int) -> None:
    traced = deep(layers=12)
    # Each cluster with every number that is kept, and with both of micro-batches, but not with every two of these.
    clusters = [(1, 1), (2, 2)] if (kept in (1, 3)) == (micro_batches == 1) else [(1, 2)]
    settings = {"micro_batches": micro_batches, "recomputes": True}
    with one_at_a_time(adds_in_memoryx=micro_batches > 1, kept_at_most=kept, keeps_weights=False):
        plan, *_ = traced.check(rows(), clusters, seeds=[0, 3], **settings)
    assert num_again(plan) == times * micro_batches
    # Beside these are those that the last layer reads, which is not run again, and the one before it.
    assert max(outputs_at_once(plan)) == kept + 2


def outputs_at_once(plan: plan_pb2.Plan) -> Iterator[int]:
    """By run of the backward pass: the outputs of layers but the last that are there, one of which it reads."""
    held: set[int] = set()
    for run in (i.run for i in plan.wafer.instructions if i.HasField("run")):
        if run.layer.endswith(BACKWARD):
            yield len(held)
        elif run.layer.startswith("layers.") and run.layer != "layers.11":
            held.update(run.outputs)
        held.difference_update(run.drops)


class Balance(nn.Module):
    """A loss of each layer's gates."""

    def forward(self, gates: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([((gate > 0.2).to(gate.dtype) * gate.square()).mean() for gate in gates]).sum()


class GatedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates, self.wide, self.narrow = nn.Linear(WIDE, 4), nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gate = self.gates(x).softmax(1)
        x = x + self.narrow(F.gelu(self.wide(x))) * gate.amax(1, keepdim=True)
        return x, gate, (gate.detach() > 0.3).to(x.dtype).mean()


class Gated(nn.Module):
    """Layers with statistics of the batch, on which the loss depends, as models of experts have them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.balance = nn.ModuleList(GatedLayer() for _ in range(layers)), Balance()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates, shares = [], []
        for layer in self.layers:
            x, gate, share = layer(x)
            gates.append(gate)
            shares.append(share)
        return x.square().mean() + self.balance(gates) + torch.stack(shares).sum()


@functools.cache
def gated() -> Traced:
    torch.manual_seed(0)
    return Traced(lambda model: lambda batch: trained(model, model(batch)), Gated(7), rows()[0])


@pytest.mark.parity
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("settings", [{"row_slices": 2}, {"recomputes": True, "row_slices": 2}])
def test_layers_with_statistics_are_run_again_without_them(micro_batches: int, settings: dict[str, Any]) -> None:
    traced = gated()
    settings = {"micro_batches": micro_batches, **settings}
    with one_at_a_time(adds_in_memoryx=micro_batches > 1):
        kept = traced.plan(1, **settings)
    with one_at_a_time(adds_in_memoryx=micro_batches > 1, kept_every=(3,)):
        again, *_ = traced.check(rows(), CLUSTERS, seeds=[0, 3], **settings)
    labels = Counter(i.run.layer for i in again.wafer.instructions if i.HasField("run"))
    labels.subtract(i.run.layer for i in kept.wafer.instructions if i.HasField("run"))
    assert [labels[f"layers.{number}"] for number in range(6)] == [micro_batches, micro_batches, 0] * 2
    assert again.wafer.own_bytes < kept.wafer.own_bytes


def test_weights_leave_the_wafer_between_two_runs_of_a_layer_where_nothing_else_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    traced = Traced(mean_step, Deep(layers=16), torch.randn(1, 997, WIDE, dtype=torch.float64))
    memory, received = traced.plan(1, recomputes=True).wafer.own_bytes, []
    while True:
        try:
            plan = CompiledStep(traced.text).plan(
                Target(num_csx=1, num_shards=1, recomputes=True, row_slices=2, wafer_memory_bytes=memory)
            )
        except WaferMemoryError:
            break
        check_plan(plan)
        received.append((list(plan.wafer.kept_every), kinds(plan)["receive"]))
        # With a little less than this plan needs, another one is made.
        memory = round(0.99 * needed_bytes(plan))
    (deepest, most), fewest = received[-1], min(count for kept, count in received if kept == received[-1][0])
    assert deepest
    assert most > fewest
    with one_at_a_time(kept_every=tuple(deepest), keeps_weights=False):
        traced.check([torch.randn(1, 997, WIDE, dtype=torch.float64)], [(1, 1)], recomputes=True)


def test_layers_are_run_again_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    tokens = torch.randn(2, 2000, WIDE, dtype=torch.float64)  # of which a single row does not fit
    traced = Traced(mean_step, Deep(layers=16), tokens)
    memory = traced.plan(1, micro_batches=2, recomputes=True).wafer.own_bytes * 6 // 10
    plan = compiled(traced.text, memory, MicroBatching())
    assert plan.wafer.kept_every
    assert plan.wafer.own_bytes <= memory
    assert "in a row, one keeps its outputs" in " ".join(micro_batch_notes(plan))
    check_plan(plan)


def test_random_numbers_are_drawn_again_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDE, WIDE))
    traced, batches = Traced(mean_step, model, rows()[0]), rows()
    results = []
    for recomputes in (False, True):
        simulation = simulate(traced.plan(2, micro_batches=2, recomputes=recomputes), traced.initial)
        results.append((simulation.run([[batch] for batch in batches]), simulation.states))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def compiled(text: str, memory: int, asked: MicroBatching | None = None) -> plan_pb2.Plan:
    target = Target(num_csx=1, num_shards=1, wafer_memory_bytes=memory)
    plan = compile_in_micro_batches(text, target, asked or MicroBatching(), lambda: pytest.fail("no time is predicted"))
    check_plan(plan)
    return plan


def test_memory_decides_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less and less memory: all at once, in rounds, gradients added in MemoryX, activations computed again."""
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    text = deep(layers=12, batch=192).text
    memory, seen = 128 << 20, []
    while True:
        try:
            plan = compiled(text, memory)
        except WaferMemoryError:
            break
        assert plan.wafer.own_bytes <= memory
        done = {"divided": plan.wafer.micro_batches > 1, "added": additions(plan) > 0, "again": plan.wafer.recomputes}
        seen.append({name for name, is_done in done.items() if is_done})
        # With no more than this plan needs, the same would be done.
        memory = round(0.85 * needed_bytes(plan))
    assert seen[0] == set()
    assert {"divided"} in seen
    assert {"divided", "added"} in seen
    assert any("again" in what for what in seen)


def test_a_step_may_have_more_operations_than_a_plan_can_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_FLOPS", 1000)
    assert deep().plan(1).wafer.flops == 1000


def test_notes_say_what_is_done() -> None:
    with one_at_a_time(adds_in_memoryx=True):
        notes = " ".join(micro_batch_notes(deep().plan(1, micro_batches=2, recomputes=True)))
    assert "MemoryX adds" in notes
    assert "again" in notes


@pytest.mark.parametrize("fault", ["lost", "twice", "read alone"])
def test_a_plan_that_lacks_a_round_is_refused(fault: str) -> None:
    with one_at_a_time(adds_in_memoryx=True):
        plan = deep().plan(1, micro_batches=3)
    part = plan.memoryx[0]
    last = next(i.receive for i in reversed(part.instructions) if i.receive.adds_to)
    match fault:
        case "lost":
            last.adds_to = 0
        case "twice":
            other = next(i.receive for i in part.instructions if i.receive.adds_to == last.adds_to)
            other.group, last.group = last.group, other.group
        case "read alone":
            last.keep = True
    with pytest.raises(PlanError):
        check_plan(plan)
