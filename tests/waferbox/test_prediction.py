"""Predicted steps: of plans that are computed on paper, and what must hold of any."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prediction_plans import GRADIENT, NBYTES, WEIGHTS, plan_of

from waferbox.prediction.prediction import CompiledFor, Prediction, StuckError, is_plan_for, predict
from waferbox.prediction.simulation import Compute, Costs, Level, Rates, fan_outs, tree_levels
from wsc.v1 import plan_pb2

FREE = Rates(wafer=Compute(), memoryx=Compute(), swarmx_bytes_per_second=math.inf)
LINK = float(NBYTES)  # a group a second


def step(
    plan: plan_pb2.Plan,
    rates: Rates = FREE,
    *,
    wafers: int = 1,
    fan_out: int = 2,
    wafer: float = 0.0,
    shard: float = 0.0,
) -> Prediction:
    """wafer, shard: seconds of the only kernel."""
    costs = Costs(wafer={1: wafer}, memoryx=({1: shard},))
    return predict(plan, wafers, fan_out, rates, costs)


def share(prediction: Prediction, name: str) -> float:
    (found,) = [load.share for load in prediction.loads if load.name == name]
    return found


def test_one_group_on_one_link() -> None:
    # Out of MemoryX and into the wafer at once; computed; the hop back; updated.
    made = step(plan_of(), replace(FREE, link_bytes_per_second=LINK), wafer=3.0, shard=5.0)
    assert made.step_seconds == pytest.approx(1 + 3 + 1 + 5)
    assert (made.depth, made.swarmx_nodes) == (0, 0)
    assert made.rows_per_second == pytest.approx(10 / 10)
    assert share(made, "wafer compute") == pytest.approx(3 / 10)
    assert share(made, "MemoryX compute") == pytest.approx(5 / 10)
    assert share(made, "a wafer's link, in") == pytest.approx(1 / 10)
    assert share(made, "SwarmX compute") == 0.0


def test_latency_and_the_work_of_frames() -> None:
    # Two hops, each with a latency and work at both ends. In each fourth step the wafer's credit is another frame.
    rates = replace(FREE, latency_seconds=1.0, frame_seconds=10.0)
    assert step(plan_of(), rates).step_seconds == pytest.approx(2 * (1 + 2 * 10) + 10 / 4)
    # Four hops, and two children of SwarmX, which has three frames' work with the credit and takes the gradients two
    # frames' work later.
    assert step(plan_of(), rates, wafers=2).step_seconds == pytest.approx(4 * (1 + 2 * 10) + 2 * 10 + (10 + 20) / 4)


def test_transfers_overlap_with_computing() -> None:
    # Without gradients nothing waits for the end of a step: the slower of line and wafer is always busy.
    rates = replace(FREE, link_bytes_per_second=LINK)
    assert step(plan_of(8, reduced=False), rates, wafer=0.5).step_seconds == pytest.approx(8.0)
    slow = step(plan_of(8, reduced=False), rates, wafer=2.0)
    assert slow.step_seconds == pytest.approx(16.0)
    assert slow.limit == "wafer compute"


def test_a_tree_of_two_levels() -> None:
    # Four wafers, two branches: each hop down takes two groups' time, and so does each up, and the last one.
    rates = replace(FREE, link_bytes_per_second=LINK)
    down, up = 1 + 2 + 2, 2 + 2 + 1
    made = step(plan_of(), rates, wafers=4)
    assert (made.depth, made.swarmx_nodes) == (2, 3)
    assert made.step_seconds == pytest.approx(down + up)
    wide = step(plan_of(), rates, wafers=4, fan_out=4)
    assert wide.depth == 1
    assert wide.step_seconds == pytest.approx(1 + 4 + 4 + 1)
    adding = replace(rates, swarmx_bytes_per_second=LINK)
    assert step(plan_of(), adding, wafers=4).step_seconds == pytest.approx(down + up + 2 * 2)


@pytest.mark.parametrize(("has_trees", "seconds", "nodes"), [(False, 32.0, 1), (True, 16.0, 2)])
def test_each_shard_may_have_a_tree_of_its_own(has_trees: bool, seconds: float, nodes: int) -> None:
    # A root sends each group to four wafers, one after the other.
    plan = plan_of(8, reduced=False)
    other = plan.memoryx.add(shard=1)
    for groups in (plan.wafer.groups, plan.swarmx.groups, plan.memoryx[0].groups):
        for group in groups[1::2]:
            group.source_shard = 1
    shard = plan.memoryx[0]
    other.groups.extend(shard.groups[1::2])
    other.instructions.extend(shard.instructions[1::2])
    del shard.groups[1::2], shard.instructions[1::2]
    plan.num_shards = 2
    rates, costs = replace(FREE, link_bytes_per_second=LINK), Costs(wafer={1: 0.0}, memoryx=({}, {}))
    made = predict(plan, 4, 4, rates, costs, has_trees=has_trees)
    assert made.step_seconds == pytest.approx(seconds)
    assert made.swarmx_nodes == nodes


@pytest.mark.parametrize("wafers", [1, 4])
@pytest.mark.parametrize("has_trees", [False, True])
def test_gradients_of_trees_share_the_arena_of_the_wafers(has_trees: bool, wafers: int) -> None:
    plan = plan_of(4, in_arena=True)
    other = plan.memoryx.add(shard=1, arena=plan.memoryx[0].arena)
    shard = plan.memoryx[0]
    own = {WEIGHTS + 10 * number for number in (1, 3)} | {GRADIENT + 10 * number for number in (1, 3)}
    for groups in (plan.wafer.groups, plan.swarmx.groups, shard.groups):
        for group in groups:
            if group.id in own:
                group.source_shard = int(group.kind == plan_pb2.GROUP_KIND_WEIGHTS)
                group.shards[:] = [1] if group.shards else []
    instructions, groups_of = list(shard.instructions), list(shard.groups)
    del shard.instructions[:], shard.groups[:]
    for group in groups_of:
        (other if group.id in own else shard).groups.append(group)
    receiver = shard
    for instruction in instructions:
        number = instruction.send.group or instruction.receive.group
        receiver = (other if number in own else shard) if number else receiver
        receiver.instructions.append(instruction)
    plan.num_shards = 2
    rates, costs = replace(FREE, link_bytes_per_second=LINK), Costs(wafer={1: 1.0}, memoryx=({1: 0.0}, {1: 0.0}))
    made = predict(plan, wafers, 4, rates, costs, has_trees=has_trees)
    assert 4.0 < made.step_seconds < 4 * 24


def test_no_more_weights_are_on_their_way_than_credit_allows() -> None:
    # A latency of 1 s a hop: two down. The wafers give credit for 4 groups, which takes two more hops, and 8 may be
    # under way, so that in the long run 8 groups take no less than a round of 4 s. A single wafer has half the hops.
    plan, rates = plan_of(80, reduced=False), replace(FREE, latency_seconds=1.0)
    assert step(plan, rates, wafers=2).step_seconds == pytest.approx(80 / 8 * 4)
    assert step(plan, rates).step_seconds == pytest.approx(80 / 8 * 2)


def test_gradients_wait_until_their_place_is_released() -> None:
    # Two gradients with one place: the second kernel waits until MemoryX has let go of the first.
    rates = replace(FREE, latency_seconds=1.0)
    for wafers, hops in ((1, 1), (2, 2)):
        free, bound = (step(plan_of(2, in_arena=bounded), rates, wafers=wafers) for bounded in (False, True))
        assert free.step_seconds == pytest.approx(2.0 * hops)
        assert bound.step_seconds == pytest.approx(free.step_seconds + 2.0)


def test_roles_that_wait_for_one_another_are_told_of() -> None:
    plan = plan_of()
    del plan.memoryx[0].instructions[0]
    with pytest.raises(StuckError, match="step 1"):
        step(plan)


def test_a_pipelined_wafer_does_not_grow() -> None:
    with pytest.raises(ValueError, match="pipelined"):
        step(plan_pb2.Plan(pipeline=plan_pb2.PipelinePlan()))


@given(
    groups=st.integers(1, 12),
    wafers=st.integers(1, 64),
    fan_out=st.integers(2, 8),
    link=st.floats(1e5, 1e9),
    faster=st.floats(1.0, 100.0),
    wafer=st.floats(0.0, 0.1),
    shard=st.floats(0.0, 0.1),
)
def test_faster_links_are_never_slower_and_nothing_is_busy_for_more_than_a_step(
    groups: int, wafers: int, fan_out: int, link: float, faster: float, wafer: float, shard: float
) -> None:
    rates = replace(FREE, link_bytes_per_second=link, latency_seconds=1e-4, frame_seconds=1e-5)
    made = step(plan_of(groups), rates, wafers=wafers, fan_out=fan_out, wafer=wafer, shard=shard)
    better = replace(rates, link_bytes_per_second=link * faster)
    quick = step(plan_of(groups), better, wafers=wafers, fan_out=fan_out, wafer=wafer, shard=shard)
    assert quick.step_seconds <= made.step_seconds * (1 + 1e-9)
    for prediction in (made, quick):
        assert all(load.share <= 1 + 1e-9 for load in prediction.loads)


def test_levels_and_fan_outs() -> None:
    assert tree_levels(1, 1) == tree_levels(1, 4) == ()
    assert tree_levels(2, 4) == (Level(nodes=1, children=2, wafers=1),)
    assert tree_levels(5, 4) == (Level(nodes=1, children=2, wafers=3), Level(nodes=2, children=3, wafers=1))
    assert [level.nodes for level in tree_levels(1024, 4)] == [1, 4, 16, 64, 256]
    assert list(fan_outs(1)) == [1]
    assert list(fan_outs(10)) == [2, 4, 8, 10]
    with pytest.raises(ValueError, match="two branches"):
        tree_levels(4, 1)


def test_a_thousand_wafers_cost_no_more_events_than_a_few() -> None:
    rates = replace(FREE, link_bytes_per_second=LINK)
    few, many = step(plan_of(), rates, wafers=4, fan_out=2), step(plan_of(), rates, wafers=1024, fan_out=2)
    assert (few.depth, many.depth) == (2, 10)
    assert many.step_seconds == pytest.approx(few.step_seconds + 8 * (2 + 2))


@pytest.mark.parametrize("field", ["flops_per_second", "call_seconds"])
def test_rates_that_cannot_be(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Compute(**{field: -1.0})


@pytest.mark.parametrize(
    ("micro_batches", "recomputes", "is_used"), [(1, False, True), (2, False, False), (1, True, False)]
)
def test_a_plan_is_used_for_more_memory_if_it_lacked_none(micro_batches: int, recomputes: bool, is_used: bool) -> None:
    plan = plan_of()
    plan.wafer.memory_bytes = 1 << 30
    plan.wafer.micro_batches, plan.wafer.recomputes = micro_batches, recomputes
    assert is_plan_for(plan, CompiledFor(wafer_memory_bytes=1 << 31)) is is_used
    assert is_plan_for(plan, CompiledFor(wafer_memory_bytes=1 << 30))
