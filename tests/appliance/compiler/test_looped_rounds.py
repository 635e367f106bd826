"""Plans of many rounds, which state the rounds between the first and the last once."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, RandomTraced, Traced, one_at_a_time, simulate
from reported_steps import MACHINE
from simulated_links import Hazard
from torch import nn
from wide_steps import WIDE, mean_step, rows, trained

from appliance.compiler import plan as plan_module
from appliance.compiler.core.target import Target
from appliance.compiler.pipeline import CompiledStep
from appliance.compiler.plan_check.check import PlanError, check_plan
from appliance.compiler.report import timeline
from appliance.compiler.report.builder import make_report
from appliance.compiler.report.page import report_page
from appliance.compiler.wafer_schedule import arena
from appliance.compiler.wafer_schedule.segment_runs import StepOrder
from waferbox.prediction.prediction import predict_scaled
from waferbox.prediction.simulation import Compute, Rates
from waferbox.runtime.loops import in_order
from wsc.v1 import plan_pb2

LAYERS = 4
CLUSTERS = [(1, 1), (1, 2), (3, 3)]


class Chain(nn.Module):
    """As many layers as a round needs to be longer than MemoryX is ahead of the wafers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Dropout(dropout)) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def gathered_step(model: Any) -> Any:
    """Has outputs of single rows, and reads a value of the whole batch in each micro-batch."""

    def step(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = batch[:, 0] > 0
        made = model(batch).square().sum(1)
        loss = (made * weights).sum() / weights.sum()
        return trained(model, loss), made.detach()

    return step


def clipped_step(model: Any) -> Any:
    """Reads all gradients before the first update."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad * 0.1)
                parameter.grad = None
        return loss.detach() + norm

    return step


@functools.cache
def traced_chain(step: Any = mean_step, batch: int = BATCH) -> Traced:
    torch.manual_seed(0)
    return Traced(step, Chain(), torch.randn(batch, WIDE, dtype=torch.float64))


@pytest.mark.parity
@pytest.mark.parametrize("adds_in_memoryx", [False, True])
@pytest.mark.parametrize("step", [mean_step, gathered_step, clipped_step])
def test_repetitions_compute_what_the_batch_does(
    step: Any, adds_in_memoryx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    traced = traced_chain(step)
    with one_at_a_time(adds_in_memoryx=adds_in_memoryx):
        for wafers, micro_batches in ((1, 12), (3, 4)):
            plan = traced.plan(wafers, 3, micro_batches=micro_batches)
            assert plan.wafer.loop.times == micro_batches - 2
            assert all(part.loop.times == micro_batches - 2 for part in plan.memoryx)
            assert plan.wafer.arena.loop.times == (micro_batches - 2 if adds_in_memoryx else 0)
        traced.check(rows(), CLUSTERS, seeds=[0, 3, 7], micro_batches=4)
        traced.check(rows(), [(1, 1), (1, 2)], seeds=[0, 2], micro_batches=12, recomputes=True)


@pytest.mark.parity
@pytest.mark.parametrize("adds_in_memoryx", [False, True])
def test_random_numbers_are_those_of_each_micro_batch(adds_in_memoryx: bool) -> None:
    torch.manual_seed(0)
    traced = RandomTraced(mean_step, Chain(dropout=0.3), rows()[0])
    with one_at_a_time(adds_in_memoryx=adds_in_memoryx):
        plan = traced.plan(1, micro_batches=6)
        assert set(plan.wafer.number_values) & set(plan.wafer.looped_parts)
        traced.check(rows(), [(1, 1), (2, 2)], micro_batches=6)


def scheduled(traced: Traced, *, at_once: int, is_listed: bool, **how: Any) -> plan_pb2.Plan:
    """A plan with 12 micro-batches, in rounds of so many. is_listed: whether all rounds are listed."""

    def order(work: Any, tried: Callable[..., Any]) -> Any:
        chosen = StepOrder(micro_batches=12, at_once=at_once, **how)
        return tried(chosen, chosen.rounds) if is_listed else tried(chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "_fitting_order", order)
        plan = CompiledStep(traced.text).plan(Target(num_csx=1, num_shards=2, micro_batches=12))
    check_plan(plan)
    return plan


def actions(plan: plan_pb2.WaferPlan | plan_pb2.MemoryXPlan) -> list[Any]:
    """What a role does in a step, in order: its runs, and the first value of what it sends and receives, as states."""
    groups = {group.id: group for group in plan.groups}
    found: list[Any] = []
    for instruction, _ in in_order(plan.instructions, plan.loop):
        kind = instruction.WhichOneof("kind")
        match kind:
            case "run":
                run = instruction.run
                found.append((kind, run.layer, run.kernel, len(run.inputs), len(run.outputs), len(run.drops)))
            case "commit":
                found.append((kind, instruction.commit.state))
            case _:
                group = groups[(instruction.send if kind == "send" else instruction.receive).group]
                found.append((kind, group.layer, group.nbytes, list(group.shards), instruction.receive.keep))
    return found


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("how", [{}, {"adds_in_memoryx": True}, {"keeps_weights": False}], ids=str)
@pytest.mark.parametrize("step", [mean_step, gathered_step])
def test_roles_do_the_same_as_with_all_rounds_listed(
    step: Any, how: dict[str, bool], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    traced = traced_chain(step)
    looped, listed = (scheduled(traced, at_once=at_once, is_listed=is_listed, **how) for is_listed in (False, True))
    assert looped.wafer.loop.times == 12 // at_once - 2
    assert not listed.wafer.HasField("loop")
    assert actions(looped.wafer) == actions(listed.wafer)
    for one, other in zip(looped.memoryx, listed.memoryx, strict=True):
        assert actions(one) == actions(other)
    assert looped.wafer.flops == listed.wafer.flops
    assert looped.wafer.own_bytes == listed.wafer.own_bytes


@pytest.mark.parametrize("adds_in_memoryx", [False, True])
def test_a_plan_does_not_grow_with_its_rounds(adds_in_memoryx: bool) -> None:
    """But for the parts of the batch, which are numbered."""
    sizes = []
    with one_at_a_time(adds_in_memoryx=adds_in_memoryx):
        for rounds in (4, 64):
            plan = traced_chain(batch=rounds).plan(1, micro_batches=rounds)
            for groups in (plan.wafer.groups, [plan.worker.batch]):
                for group in groups:
                    if group.kind == plan_pb2.GROUP_KIND_BATCH:
                        assert len(group.members) == rounds
                        group.ClearField("members")
            sizes.append((len(plan.wafer.instructions), len(plan.memoryx[0].instructions), plan.ByteSize()))
    few, many = sizes
    assert few[:2] == many[:2]
    assert many[2] <= 1.1 * few[2]


def test_rounds_of_few_segments_are_listed() -> None:
    """MemoryX is more than such a round ahead of the wafers."""
    torch.manual_seed(0)
    traced = Traced(mean_step, nn.Linear(WIDE, WIDE), rows()[0])
    with one_at_a_time(adds_in_memoryx=True):
        plan = traced.plan(1, micro_batches=6)
        assert not plan.wafer.HasField("loop")
        traced.check(rows(), [(1, 1), (2, 2)], micro_batches=6)


def lose_a_repetition(plan: plan_pb2.Plan) -> None:
    plan.wafer.loop.times -= 1


def repeat_a_shard_more_often(plan: plan_pb2.Plan) -> None:
    plan.memoryx[0].loop.times += 1


def begin_early(plan: plan_pb2.Plan) -> None:
    plan.wafer.loop.begin -= 1


def read_the_part_of_one_micro_batch(plan: plan_pb2.Plan) -> None:
    del plan.wafer.looped_parts[:]


def loop_a_weight(plan: plan_pb2.Plan) -> None:
    body = plan.wafer.instructions[plan.wafer.loop.begin : plan.wafer.loop.end]
    weight = next(i.run.inputs[0] for i in body if i.HasField("run"))
    plan.wafer.looped_parts.append(weight)


def drop_a_weight(plan: plan_pb2.Plan) -> None:
    """That is read in the next repetition, and is not sent again."""
    body = plan.wafer.instructions[plan.wafer.loop.begin : plan.wafer.loop.end]
    runs = [i.run for i in body if i.HasField("run")]
    runs[-1].drops.append(runs[0].inputs[0])


def write_gradients_too_early(plan: plan_pb2.Plan) -> None:
    for stated in (plan.wafer.arena, plan.swarmx.arena, *(part.arena for part in plan.memoryx)):
        stated.places[stated.loop.begin].window += 1


def count_less_on_swarmx(plan: plan_pb2.Plan) -> None:
    plan.swarmx.times[0] += 1


FAULTS = [
    lose_a_repetition,
    repeat_a_shard_more_often,
    begin_early,
    read_the_part_of_one_micro_batch,
    loop_a_weight,
    drop_a_weight,
    write_gradients_too_early,
    count_less_on_swarmx,
]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_loop_that_is_not_the_rounds_is_refused(fault: Callable[[plan_pb2.Plan], None] | None) -> None:
    plan = scheduled(traced_chain(), at_once=2, is_listed=False, adds_in_memoryx=True)
    if fault is not None:
        fault(plan)
    with pytest.raises(PlanError) if fault is not None else nullcontext():
        check_plan(plan)


def test_a_place_of_the_loop_that_is_written_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the simulation, which the other tests rest on."""
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)
    traced = traced_chain()
    with one_at_a_time(adds_in_memoryx=True):
        plan = traced.plan(1, micro_batches=6)
    for stated in (plan.wafer.arena, plan.swarmx.arena, *(part.arena for part in plan.memoryx)):
        for place in stated.places:
            place.window = len(stated.places)
    batches = [[batch] for batch in rows()]
    with pytest.raises(Hazard):
        [simulate(plan, traced.initial).run(batches, seed) for seed in range(6)]


@pytest.mark.parametrize("adds_in_memoryx", [False, True])
def test_a_prediction_of_many_rounds_rests_on_some(adds_in_memoryx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = traced_chain(batch=64)
    with one_at_a_time(adds_in_memoryx=adds_in_memoryx):
        plan = traced.plan(1, micro_batches=64)
    some = make_report(plan, "key", MACHINE)
    monkeypatch.setattr(timeline, "_MOST_REPETITIONS", 64)
    every = make_report(plan, "key", MACHINE)
    assert some.timeline.left_out_rounds == 62 - 12
    assert every.timeline.left_out_rounds == 0
    assert len(some.timeline.spans) < len(every.timeline.spans) / 4
    assert some.timeline.step_seconds == pytest.approx(every.timeline.step_seconds, rel=1e-3)
    assert some.timeline.wafer_busy_seconds == pytest.approx(every.timeline.wafer_busy_seconds)
    assert every.totals.streamed_bytes == some.totals.streamed_bytes
    assert "50 rounds are not drawn" in report_page(some)


def test_the_report_counts_all_repetitions() -> None:
    looped, listed = (
        make_report(scheduled(traced_chain(), at_once=2, is_listed=is_listed, adds_in_memoryx=True), "key", MACHINE)
        for is_listed in (False, True)
    )
    assert looped.timeline.step_seconds == pytest.approx(listed.timeline.step_seconds)
    assert [dataclasses.replace(layer, forward_seconds=0, backward_seconds=0) for layer in looped.layers] == [
        dataclasses.replace(layer, forward_seconds=0, backward_seconds=0) for layer in listed.layers
    ]
    for one, other in zip(looped.layers, listed.layers, strict=True):
        assert one.backward_seconds == pytest.approx(other.backward_seconds)


@pytest.mark.parametrize("adds_in_memoryx", [False, True])
def test_a_simulated_cluster_takes_as_long_as_with_listed_rounds(adds_in_memoryx: bool) -> None:
    plans = [
        scheduled(traced_chain(), at_once=1, is_listed=is_listed, adds_in_memoryx=adds_in_memoryx)
        for is_listed in (False, True)
    ]
    compute = Compute(flops_per_second=1e9, bytes_per_second=1e9, call_seconds=1e-5)
    rates = Rates(wafer=compute, memoryx=compute, swarmx_bytes_per_second=1e9, link_bytes_per_second=1e8)
    looped, listed = (predict_scaled(plan, 4, rates).best for plan in plans)
    assert looped.step_seconds == pytest.approx(listed.step_seconds, rel=0.02)
