"""The arena of gradients: what it holds, that nothing waits for ever, and that a place used too early is noticed."""

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from compiled_steps import Traced
from plan_simulator import Simulation
from simulated_links import Deadlock, Hazard
from torch import nn

from appliance.compiler import plan as plan_module
from appliance.compiler.memoryx_schedule import schedule as memoryx_schedule
from appliance.compiler.plan_check.check import PlanError, check_plan
from appliance.compiler.wafer_schedule import arena
from waferbox.runtime.arena import ArenaCounts, is_in_arena
from waferbox.runtime.loops import in_order
from wsc.v1 import plan_pb2

WIDE = 80  # more than INLINE_BYTES in a square matrix of float64
LAYERS = 7
CLUSTERS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3)]


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small models have an arena in which groups overlap."""
    monkeypatch.setattr(arena, "SLACK_BYTES", 0)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@functools.cache
def trained(*, clip: bool = False, seen: bool = False, again: bool = False) -> tuple[Traced, list[torch.Tensor]]:
    """clip: updates wait for the norm of all gradients. seen: the script gets a large gradient. again: the wafers read
    a gradient that they have sent."""

    def build(model: Any) -> Any:
        def step(x: torch.Tensor) -> Any:
            for parameter in model.parameters():
                parameter.grad = None
            loss = model(x).square().sum()
            loss.backward()
            with torch.no_grad():
                scale: Any = 1e-3
                if clip:
                    norms = torch.stack([p.grad.square().sum() for p in model.parameters()])
                    scale = 1e-2 / (norms.sum().sqrt() + 1)
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad * scale)
                result = [loss.detach()]
                if seen:
                    result.append(model.layers[3].weight.grad * 1.0)
                if again:
                    result.append((x @ model.layers[-1].weight.grad).sum())
                return result

        return step

    torch.manual_seed(0)
    batches = [torch.randn(12, WIDE, dtype=torch.float64) for _ in range(4)]
    return Traced(build, Chain(), batches[0]), batches


@pytest.fixture(scope="module")
def plain() -> tuple[Traced, list[torch.Tensor]]:
    return trained()


def test_the_arena_holds_two_segments_and_not_the_model(plain: tuple[Traced, list[torch.Tensor]]) -> None:
    plan = plain[0].plan(2, 2)
    places = plan.wafer.arena.places
    groups = {group.id: group for group in plan.wafer.groups}
    assert len(places) == LAYERS
    assert plan.wafer.arena.credited
    assert plan.wafer.arena.nbytes < 3 * max(groups[place.group].nbytes for place in places)
    assert plan.swarmx.arena == plan.memoryx[1].arena == plan.wafer.arena
    assert all(not i.receive.keep for part in plan.memoryx for i in part.instructions)


def test_room_for_all_groups_costs_no_message(
    plain: tuple[Traced, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "SLACK_BYTES", 16 << 20)
    plan = plain[0].plan(1)
    assert not plan.wafer.arena.credited
    assert not ArenaCounts(plan.wafer.arena).credited
    ends = [(place.offset, place.group) for place in plan.wafer.arena.places]
    groups = {group.id: group for group in plan.wafer.groups}
    assert all(before[0] + groups[before[1]].nbytes <= after[0] for before, after in pairwise(ends))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("how", [{}, {"clip": True}, {"seen": True, "again": True}], ids=str)
@pytest.mark.parity
def test_results_do_not_depend_on_who_is_slow(how: dict[str, bool], cluster: tuple[int, int]) -> None:
    traced, batches = trained(**how)
    assert traced.plan(*cluster).wafer.arena.credited
    traced.check(batches, [cluster], seeds=range(7))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parity
def test_an_arena_of_one_segment_gives_the_same_results(
    plain: tuple[Traced, list[torch.Tensor]], cluster: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "lay_out_arena", functools.partial(arena.lay_out_arena, is_small=True))
    traced, batches = plain
    plan = traced.plan(*cluster)
    assert plan.wafer.arena.nbytes < 2 * WIDE * WIDE * 8
    traced.check(batches, [cluster], seeds=range(7))


def test_gradients_that_wait_for_all_others_are_kept_by_memoryx() -> None:
    plan = trained(clip=True)[0].plan(1, 2)
    for part in plan.memoryx:
        groups = {group.id: group for group in part.groups}
        received = [i.receive for i in part.instructions if i.WhichOneof("kind") == "receive"]
        large = [receive.keep for receive in received if is_in_arena(groups[receive.group])]
        assert len(large) > 1
        assert all(large[:-1])


def broken(plan: plan_pb2.Plan) -> Iterator[plan_pb2.SendArena]:
    yield from (plan.wafer.arena, plan.swarmx.arena, *(part.arena for part in plan.memoryx))


def runs_wrong(traced: Traced, batches: list[torch.Tensor], plan: plan_pb2.Plan, seeds: range) -> bool:
    expected, _ = traced.expected(batches)
    for seed in seeds:
        try:
            results = Simulation(plan, traced.initial).run([[batch] for batch in batches], seed)
        except (Hazard, Deadlock):
            return True
        for result, wanted in zip(results, expected, strict=True):
            if not all(torch.allclose(a, b) for a, b in zip(result.values(), wanted, strict=True)):
                return True
    return False


@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (2, 2)])
def test_a_place_that_is_written_too_early_is_noticed(
    plain: tuple[Traced, list[torch.Tensor]], cluster: tuple[int, int]
) -> None:
    traced, batches = plain
    plan = traced.plan(*cluster)
    assert not runs_wrong(traced, batches, plan, range(4))
    for arena_of in broken(plan):
        for place in arena_of.places:
            place.window += 1
    with pytest.raises(PlanError):
        check_plan(plan)
    assert runs_wrong(traced, batches, plan, range(12))


def test_a_gradient_that_is_not_kept_is_noticed() -> None:
    traced, batches = trained(clip=True)
    plan = traced.plan(1)
    for instruction in plan.memoryx[0].instructions:
        if instruction.WhichOneof("kind") == "receive":
            instruction.receive.keep = False
    with pytest.raises(PlanError):
        check_plan(plan)
    assert runs_wrong(traced, batches, plan, range(6))


@pytest.mark.parametrize(("ahead", "stuck"), [(2, False), (1000, True)])
def test_weights_that_go_too_far_ahead_would_hold_up_the_gradients(
    plain: tuple[Traced, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch, ahead: int, stuck: bool
) -> None:
    """A shard that waits in vain for room to send weights releases nothing, and the wafer waits for just that."""
    traced, batches = plain
    monkeypatch.setattr(memoryx_schedule, "WEIGHTS_AHEAD", ahead)
    monkeypatch.setattr("simulated_roles.WEIGHTS_WINDOW", 2)
    monkeypatch.setattr("simulated_roles.WEIGHTS_CREDIT_BATCH", 1)
    plan = traced.plan(1, prefetch_layers=5, drops_weights=True)
    simulation = Simulation(plan, traced.initial)
    with pytest.raises(Deadlock) if stuck else nullcontext():
        simulation.run([[batch] for batch in batches])


@pytest.mark.parametrize("times", [1, 2, 5])
def test_counts_by_brute_force(times: int) -> None:
    """Whatever receivers are told, a sender that waits for a count gets it as soon as it is true."""
    generator = torch.Generator().manual_seed(0)

    def below(end: int) -> int:
        return int(torch.randint(0, end, (1,), generator=generator))

    for _ in range(200):
        number = 1 + below(8)
        layout = plan_pb2.SendArena(credited=True)
        for group in range(1, number + 1):
            layout.places.add(group=group, window=below(number))
        if times > 1:
            begin, end = sorted((below(number), below(number)))
            layout.loop.begin, layout.loop.end, layout.loop.times = begin, end + 1, times
        counts = ArenaCounts(layout)
        order = [(place.group, repetition) for place, repetition in in_order(layout.places, layout.loop)]
        sent = [(*each, step) for step in (1, 2, 3, 4) for each in order]
        assert [counts.number(group, step, repetition) for group, repetition, step in sent] == [*range(len(sent))]
        assert counts.num_groups == len(order)
        own = [g for g in range(1, number + 1) if below(5) < 3] or [1]
        released = counts.released_counts(own)
        awaited, begins = set(), set()
        for place, (g, repetition, step) in enumerate(sent):
            first, window = counts.awaited(g), counts.window(g)
            assert first is not None
            assert window is not None
            awaited.add(counts.count(first, step, repetition))
            begins.add(place - window)
        assert awaited == begins
        told = counts.first_counts(plan_pb2.Group(id=group, shards=[7]) for group in own)[7]
        for place, (group, repetition, step) in enumerate(sent[: 3 * len(order)]):
            if group in own:
                relative = released[group][repetition]
                told = counts.count(relative, step) if relative else told
                # What is true by now: everything up to this receiver's next group.
                true = next(n for n in range(place + 1, len(sent)) if sent[n][0] in own)
                assert told <= true
                assert max((c for c in awaited if 0 < c <= true), default=0) <= told
        reached = 3 * len(order)
        assert set(counts.awaited_between(0, reached)) >= {c for c in awaited if 0 < c <= reached}
