"""Makes the plan of a step: the parts of all roles, put together."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from xdsl.ir import SSAValue

from appliance.compiler.core.progress import progress
from appliance.compiler.core.target import HALF_TYPES, Target
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.cost.link_memory import set_link_bytes
from appliance.compiler.memoryx_schedule.memory_plan import adding_node_bytes, shard_bytes
from appliance.compiler.memoryx_schedule.schedule import ShardScheduler, find_exchanges, find_output
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Bundle, Numbers
from appliance.compiler.partition.shards import Sharing, divide
from appliance.compiler.pipelined.plan import fill_pipeline
from appliance.compiler.sharding.gathered import gathered_values, reason_of
from appliance.compiler.wafer_schedule.arena import lay_out_arena
from appliance.compiler.wafer_schedule.memory_plan import MemoryPlan, check_memory, plan_memory
from appliance.compiler.wafer_schedule.overwriting import add_overwritten
from appliance.compiler.wafer_schedule.schedule import WaferSchedule, WaferWork, make_wafer_work, schedule_wafer
from appliance.compiler.wafer_schedule.segment_runs import StepOrder
from appliance.compiler.wafer_schedule.streams import Departure, Load
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.locations import source_of
from waferbox.runtime.loops import with_times
from wsc.v1 import plan_pb2

# Version of the messages in plan.proto and of their meaning. A cached plan of another format is compiled again.
PLAN_FORMAT = 19

# More rounds stream the weights so often that it is better to compute activations again, for more rows at once.
MOST_ROUNDS: Final = 64
# The most operations of a step that a plan can state: 141 billion parameters have more for 16.8 million tokens.
MOST_FLOPS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedWafer:
    """The wafer's part of a plan for weight streaming, which fits its memory.

    Attributes:
        sharing: the values of each shard.
        numbers: the numbers of values and groups, to which those of the other roles are added.
        schedule: the wafer's program.
    """

    sharing: Sharing
    numbers: Numbers
    schedule: WaferSchedule


def make_plan(cut: Cut, target: Target, wafer: FittedWafer | None) -> plan_pb2.Plan:
    """Schedules all roles.

    Args:
        cut: the step, divided between wafers and MemoryX.
        target: the cluster.
        wafer: the result of `fit_wafer`, for this plan alone; None in layer pipelined mode.

    Raises:
        CompileError: the step does not fit a wafer, or cannot be scheduled.
    """
    rows = cut.sharding.batch_rows
    plan = plan_pb2.Plan(format=PLAN_FORMAT, num_csx=target.num_csx, num_shards=target.num_shards, batch_rows=rows)
    if target.precision is not None:
        plan.precision.half = HALF_TYPES[target.precision.half]
        plan.precision.optimization_level = target.precision.level
        plan.precision.half_gradients = target.precision.half_gradients
    if wafer is None:
        progress("placing the layers in regions of the wafer")
        fill_pipeline(plan, cut, target)
    else:
        _stream(plan, cut, target, wafer)
    plan.worker.input_names.extend(argument.name for argument in cut.names.inputs)
    return plan


def _stream(plan: plan_pb2.Plan, cut: Cut, target: Target, fitted: FittedWafer) -> None:
    """Fills in the wafers, MemoryX and SwarmX, for weight streaming."""
    rows = cut.sharding.batch_rows
    sharing, numbers, wafer = fitted.sharing, fitted.numbers, fitted.schedule
    exchanges, output = find_exchanges(cut, sharing, numbers), find_output(cut, numbers)
    plan.wafer.CopyFrom(wafer.plan)
    for shard in range(target.num_shards):
        progress(f"scheduling shard {shard + 1} of {target.num_shards} of MemoryX")
        scheduler = ShardScheduler(cut, sharing, wafer, exchanges, output, target, numbers, shard)
        plan.memoryx.append(scheduler.schedule())
        plan.memoryx[-1].arena.CopyFrom(wafer.plan.arena)
        plan.memoryx[-1].own_bytes = shard_bytes(plan.memoryx[-1])
    _add_passing(plan.swarmx, wafer)
    plan.swarmx.arena.CopyFrom(wafer.plan.arena)
    plan.swarmx.own_bytes = adding_node_bytes(plan.swarmx, target.num_csx)
    for value, op in gathered_values(cut.module, cut.sharding).items():
        plan.gathered.add(value=numbers.value(value), source=str(source_of(op)), reason=reason_of(op))
    set_link_bytes(plan)
    plan.worker.batch.CopyFrom(wafer.batch)
    plan.worker.global_rows, plan.worker.local_rows = rows, rows // target.num_csx
    plan.worker.micro_batches = target.micro_batches
    _add_outputs(plan.coordinator, cut, numbers, wafer, output)


def _add_passing(plan: plan_pb2.SwarmXPlan, wafer: WaferSchedule) -> None:
    """Fills in the groups that pass through SwarmX, and how often each does."""
    groups: dict[int, plan_pb2.Group] = {}
    times: Counter[int] = Counter()
    passing: list[Load | Departure] = [*wafer.loads, *wafer.departures]
    for each in passing:
        group = each.bundle.group
        groups[group.id] = group
        times[group.id] += wafer.plan.loop.times if each.position in wafer.loop else 1
    plan.groups.extend(groups.values())
    plan.times.extend(times[number] for number in groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheduled:
    """The program of an order, and the memory that a wafer needs for it."""

    order: StepOrder
    numbers: Numbers
    wafer: WaferSchedule
    memory: MemoryPlan


def fit_wafer(cut: Cut, target: Target) -> FittedWafer:
    """Schedules the wafer, with as many micro-batches at once as fit its memory: weights are then streamed least often.

    If no number fits, MemoryX adds the gradients of the rounds, so that the wafer needs no memory for their sums.

    Raises:
        CompileError: the step does not fit a wafer, or cannot be scheduled.
    """
    sharing = divide(cut, target)
    work = make_wafer_work(cut, target)
    progress("measuring the wafer's kernels")
    profiles = profile_kernels(work.kernels)

    def scheduled(order: StepOrder, rounds: Sequence[range] | None = None) -> _Scheduled:
        numbers = Numbers()
        progress("scheduling the wafer")
        wafer = schedule_wafer(work, sharing, numbers, order, rounds or order.listed_rounds)
        plan = wafer.plan
        add_overwritten(plan, profiles)
        plan.memory_bytes = target.wafer_memory_bytes
        plan.kernel_library = target.kernel_library.code
        plan.arena.CopyFrom(lay_out_arena(plan))
        progress("planning the wafer's memory")
        memory = plan_memory(plan, profiles, target.wafer_memory_bytes)
        # Each segment then waits until the gradients of the one before were read, which is the last resort.
        if target.row_slices > 1 and not memory.fits:
            plan.arena.CopyFrom(lay_out_arena(plan, is_small=True))
            memory = plan_memory(plan, profiles, target.wafer_memory_bytes)
        return _Scheduled(order=order, numbers=numbers, wafer=wafer, memory=memory)

    found = _fitting_order(work, scheduled)
    if found.memory.fits and not found.wafer.is_repeatable:
        found = scheduled(found.order, found.order.rounds)
    has_rounds = found.wafer.plan.micro_batches_at_once < found.wafer.plan.micro_batches
    if found.memory.fits and not has_rounds and not target.drops_weights:
        found = _keeping_weights(found, scheduled)
    check_memory(
        found.memory,
        target.num_csx,
        cut.sharding.batch_rows,
        target.micro_batches,
        work.whole_batch_first,
        in_slices=target.row_slices > 1,
    )
    plan = found.wafer.plan
    instructions = with_times(plan.instructions, plan.loop)
    flops = sum(times * profiles[i.run.kernel].flops for i, times in instructions if i.HasField("run"))
    plan.flops = min(flops, MOST_FLOPS)
    plan.own_bytes, plan.recomputes = found.memory.own_bytes, target.recomputes
    plan.row_slices = target.row_slices
    return FittedWafer(sharing=sharing, numbers=found.numbers, schedule=found.wafer)


def _fitting_order(work: WaferWork, tried: Callable[[StepOrder], _Scheduled]) -> _Scheduled:
    """The order that fits with the most micro-batches at once, or the one that needs the least memory."""
    count = work.target.micro_batches
    most_rounds = count if work.target.recomputes else MOST_ROUNDS
    possible = [at_once for at_once in range(1, count) if count % at_once == 0 and count // at_once <= most_rounds]
    if possible and count > MOST_ROUNDS and not work.closing:
        # The program of all at once is long, and needs more memory: where few do not fit, it is not made.
        best = tried(StepOrder(micro_batches=count, at_once=possible[0], adds_in_memoryx=True))
        if not best.memory.fits:
            return _running_again(work, best, tried)
    best = tried(StepOrder(micro_batches=count, at_once=count))
    if best.memory.fits:
        return best
    if not possible:
        return _running_again(work, best, tried)
    # Rounded gradients are added before they are rounded, on the wafer.
    for adds_in_memoryx in (False, True) if not work.closing else (False,):
        order = StepOrder(micro_batches=count, at_once=possible[0], adds_in_memoryx=adds_in_memoryx)
        best = tried(order)
        if best.memory.fits:
            # The memory grows with the number at once. Small numbers, whose programs are short, are tried first.
            for at_once in possible[1:]:
                following = tried(replace(order, at_once=at_once))
                if not following.memory.fits:
                    break
                best = following
            return best
    return _running_again(work, best, tried)


def _running_again(work: WaferWork, best: _Scheduled, tried: Callable[[StepOrder], _Scheduled]) -> _Scheduled:
    """The order that runs the fewest layers again and fits, or the one of these and `best` that needs least memory.

    Where rows are computed in slices, weights leave the wafer between the runs of a layer if nothing else fits.
    """
    layers, order = len(work.again) if work.target.recomputes else 0, best.order
    if work.target.slices_attention:
        return _keeping_most(layers, best, tried)
    depths: list[tuple[int, ...]] = []
    for depth in range(1, layers.bit_length()):
        # With the same factor between the numbers, each depth needs least memory.
        kept_every = tuple(round(layers ** (1 - level / (depth + 1))) for level in range(1, depth + 1))
        if kept_every[-1] < 2:
            break
        depths.append(kept_every)
        found = tried(replace(order, kept_every=kept_every))
        if found.memory.needed_bytes < best.memory.needed_bytes:
            best = found
        if best.memory.fits:
            return best
    # The deepest needs least memory.
    for kept_every in reversed(depths) if work.target.row_slices > 1 else ():
        found = tried(replace(order, kept_every=kept_every, keeps_weights=False))
        if not found.memory.fits:
            return best if best.memory.fits else found
        best = found
    return best


def _keeping_most(layers: int, best: _Scheduled, tried: Callable[[StepOrder], _Scheduled]) -> _Scheduled:
    """The order that keeps the outputs of the most layers and fits, or the one that needs the least memory.

    Weights stay on the wafer between runs of a layer if there is room for as many outputs even so.
    """
    fewest, too_many = 0, layers.bit_length()  # more outputs would save few runs
    while fewest < too_many:
        kept = (fewest + too_many) // 2
        found = tried(replace(best.order, kept_at_most=kept, keeps_weights=False))
        if found.memory.fits or found.memory.needed_bytes < best.memory.needed_bytes:
            best = found
        if found.memory.fits:
            fewest = kept + 1
        else:
            too_many = kept
    if best.order.kept_at_most is not None and best.memory.fits:
        found = tried(replace(best.order, keeps_weights=True))
        best = found if found.memory.fits else best
    return best


def _keeping_weights(found: _Scheduled, tried: Callable[[StepOrder], _Scheduled]) -> _Scheduled:
    """The same order with the weights on the wafer from the forward to the backward pass, as far as there is room.

    Those of the last layers stay, as the gap between their reads is the shortest.
    """
    room = _stay_with_room(found)
    while room > found.order.longest_stay:
        kept = tried(replace(found.order, longest_stay=room))
        if kept.memory.fits:
            return kept
        room //= 2
    return found


def _stay_with_room(found: _Scheduled) -> int:
    """The longest stay on the wafer for whose weights there is room, about; 0: for none that leaves now."""
    memory, runs = found.memory, found.wafer.work
    if not runs:
        return 0
    needed = np.array([point.total_bytes for point in memory.points])
    micro_batches = [len(run.micro_batches) for run in runs]
    begins = np.cumsum([0, *micro_batches[:-1]])  # of each run, among the points
    free = memory.capacity_bytes - np.maximum.reduceat(needed, begins)
    gaps: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by length: begin, end and bytes
    before: dict[int, int] = {}  # by group: the position of its last load
    for load in found.wafer.loads:
        group = load.bundle.id
        if group in before:
            gaps[load.position - before[group]].append((before[group], load.position, load.bundle.nbytes))
        before[group] = load.position
    longest = 0
    for length in sorted(gaps):
        for begin, end, nbytes in gaps[length]:
            free[begin:end] -= nbytes
        if free.min() < 0:
            break
        longest = length
    return longest


def _add_outputs(
    plan: plan_pb2.CoordinatorPlan, cut: Cut, numbers: Numbers, wafer: WaferSchedule, output: Bundle | None
) -> None:
    """Fills in the group of each output, and the dimension in which its parts are put together."""
    bundles = [d.bundle for d in wafer.departures if d.bundle.group.to_coordinator]
    if output is not None:
        bundles.append(output)
    home: dict[SSAValue, Bundle] = {value: bundle for bundle in bundles for value in bundle.values}
    for name, value in cut.outputs:
        placement = cut.sharding.used(value)
        plan.outputs.add(
            name=name,
            type=types.to_proto(value),
            group=home[value].id,
            value=numbers.value(value),
            gathered=placement.is_sharded,
            dim=placement.dim,
            outer=placement.outer,
        )
    plan.groups.extend(bundle.group for bundle in bundles)
