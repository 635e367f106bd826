"""Makes the wafer's program in weight streaming: receive, run the segments, send values to be reduced, drop values.

Forward and backward pass are in the order of the trace. Weights are received just before the first segment that reads
them, and stay if they are read again soon. Gradients are sent after the segment that makes them, which is after that
segment's last read of the weights.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.progress import progress
from appliance.compiler.core.target import KernelLibrary, Target
from appliance.compiler.cost.kernel_profile import profile_kernel
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Bundle, KernelTable, Numbers
from appliance.compiler.partition.layers import INPUT, Segment, Waits, closure, inputs_of, partition
from appliance.compiler.partition.local import Localiser
from appliance.compiler.partition.row_slices import compute_in_slices
from appliance.compiler.partition.shards import Sharing
from appliance.compiler.sharding.propagate import Sharding
from appliance.compiler.wafer_schedule.arena import is_sent_where_it_is_written
from appliance.compiler.wafer_schedule.segment_runs import (
    SegmentRun,
    StepOrder,
    num_of_whole_batch,
    order_segment_runs,
    runs_again,
    take_out_rounding,
)
from appliance.compiler.wafer_schedule.streams import (
    Departure,
    Load,
    by_position,
    ensure_releases,
    find_departures,
    find_loads,
    last_reads,
    make_batch,
    make_tokens,
    unacknowledged_shards,
)
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import body_ops, func_of
from waferbox.cirh.execution.memory_reuse import let_reuse_memory
from waferbox.cirh.modules.sources import sources_of
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module
from waferbox.runtime.loops import body_of
from waferbox.runtime.schedule import makes_and_reads
from wsc.v1 import plan_pb2

# --- Drops ------------------------------------------------------------------------------------------------------------


def add_drops(
    instructions: Sequence[plan_pb2.Instruction],
    kept: Collection[int],
    loads: Mapping[int, Collection[int]] | None = None,
) -> None:
    """Adds to each Run the values that it is the last to read, so that the role drops them after it.

    Args:
        instructions: a program, in order.
        kept: values that are never dropped.
        loads: by group, the values that its reception brings; they are dropped before it if nothing reads them.
    """
    loads = loads or {}
    live = set(kept)
    # A value that a micro-batch makes twice; others that are made several times are sums over micro-batches.
    runs = [instruction.run for instruction in instructions]
    made: dict[int, Counter[int]] = defaultdict(Counter)  # by micro-batch
    for run in runs:
        made[run.micro_batch].update(run.outputs)
    made_again = {batch: {value for value, times in counts.items() if times > 1} for batch, counts in made.items()}
    for instruction in reversed(instructions):
        match instruction.WhichOneof("kind"):
            case "receive":
                live.difference_update(loads.get(instruction.receive.group, ()))
            case "run":
                # What is made again later is dropped in between, and each time after its last read.
                run = instruction.run
                again = made_again[run.micro_batch]
                repeated = [value for value in run.outputs if value in again] if again else []
                run.drops.extend(value for value in repeated if value not in live)
                live.difference_update(repeated)
                read = list(dict.fromkeys(run.inputs))
                run.drops.extend(value for value in read if value not in live)
                live.update(read)


# --- Segments and their kernels ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaferWork:
    """The segments of a wafer with their kernels, which do not depend on the order in which it goes through them.

    Attributes:
        cut: the step, divided between wafers and MemoryX.
        target: the cluster.
        localiser: makes the kernels.
        waits: the reduced values that each operation waits for.
        segments: one run for each segment, in order.
        closing: by segment, a run that rounds the sums of its gradients.
        whole: number of segments that come first, with all micro-batches.
        kernels: the kernels.
        sources: the sources of those of their operations that can fail.
        kernel_of: by segment, the number of its kernel.
        returned: by segment, the reduced values that come back for it.
        again: by the place of a segment of the forward pass that may be run again, as it waits for nothing, the run
            that does.
    """

    cut: Cut
    target: Target
    localiser: Localiser
    waits: Waits
    segments: Sequence[SegmentRun]
    closing: Mapping[Segment, SegmentRun]
    whole: int
    kernels: Sequence[plan_pb2.Kernel]
    sources: Sequence[plan_pb2.KernelSources]
    kernel_of: Mapping[Segment, int]
    returned: Mapping[Segment, Sequence[SSAValue]]
    again: Mapping[int, SegmentRun]

    @property
    def whole_batch_first(self) -> bool:
        """Whether most segments are run with all micro-batches before the next segment is."""
        return 2 * self.whole > len(self.segments)


def make_wafer_work(cut: Cut, target: Target) -> WaferWork:
    """Divides the wafers' operations into segments, and makes their kernels."""
    localiser, waits = Localiser(cut.sharding), Waits(cut)
    segments = make_segment_runs(
        cut,
        waits,
        recomputes=target.recomputes,
        in_slices=target.row_slices > 1,
        gradients_apart=target.slices_attention,
        in_sublayers=target.saves_memory,
    )
    # Parts of several micro-batches are added in float32 and rounded once: see `partition/precision.py`.
    rounding = [op for op in cut.wafer_ops if target.micro_batches > 1 and op.results[0] in cut.sharding.rounded]
    closing = take_out_rounding(segments, rounding)
    table = KernelTable()
    kernel_of, returned = {}, {}
    # In the order of the runs, so that the numbers of kernels ascend.
    whole = num_of_whole_batch(segments, waits, closing)
    again = _runs_again(cut, waits, segments, whole, in_slices=target.row_slices > 1)
    others = [run for place, run in again.items() if run is not segments[place]]
    runs = [*order_segment_runs(segments, 0, 1, [range(1)], closing, {}), *others]
    for number, run in enumerate(runs):
        progress("making the wafer's kernels", number, len(runs))
        kernel = localiser.kernel(run.ops, run.inputs, run.outputs)
        # Inductor decides itself which memory its loops use.
        if target.saves_memory and target.kernel_library is KernelLibrary.ATEN:
            let_reuse_memory(kernel)
        text = print_module(kernel, locations=False)
        if target.row_slices > 1:
            rows = _rows(cut.sharding, run.inputs)
            text = _in_slices(text, rows, target.row_slices, attends=target.slices_attention)
        kernel_of[run.segment] = table.number(text, run.segment.label, sources_of(body_ops(kernel)))
        returned[run.segment] = [value for op in run.ops for value in waits.returned(op)]
    return WaferWork(
        cut=cut,
        target=target,
        localiser=localiser,
        waits=waits,
        segments=segments,
        closing=closing,
        whole=whole,
        kernels=table.messages(),
        sources=table.sources(),
        kernel_of=kernel_of,
        returned=returned,
        again=again,
    )


def _runs_again(
    cut: Cut, waits: Waits, segments: Sequence[SegmentRun], whole: int, *, in_slices: bool
) -> dict[int, SegmentRun]:
    """By the place of a segment that may be run again, the run that does.

    Segments of which values leave the wafer, such as the statistics of a layer of experts, are run again only where
    rows are computed in slices, as other steps fit with smaller micro-batches. What leaves is not made again. Nor is
    what the backward pass reads in other layers than this one and the next, as that of a loss of all layers' statistics
    does: all layers would have to be run again for it. These values are kept.
    """
    leaving = _leaving(cut)
    places = [
        place
        for place, run in enumerate(segments)
        if place >= whole
        and not run.segment.backward
        and run.segment.layer != INPUT
        and (leaving.isdisjoint(run.outputs) or (in_slices and not leaving.issuperset(run.outputs)))
        and not any(waits.awaited(op) for op in run.segment.ops)
    ]
    read = {value for place in places for value in segments[place].inputs}
    readers: dict[SSAValue, set[str]] = defaultdict(set)  # by value: the layers whose backward passes read it
    for run in segments:
        if run.segment.backward:
            for value in run.inputs:
                readers[value].add(run.segment.layer)
    again = {}
    for number, place in enumerate(places):
        run = segments[place]
        following = places[number + 1] if place != places[-1] else min(place + 1, len(segments) - 1)
        near = {run.segment.layer, segments[following].segment.layer}
        outputs = [
            value
            for value in run.outputs
            if value not in leaving and (value in read or value in readers) and readers.get(value, set()) <= near
        ]
        if outputs:
            again[place] = run if outputs == run.outputs else _making(run, outputs)
    return again


def _making(run: SegmentRun, outputs: Sequence[SSAValue]) -> SegmentRun:
    """A run of a segment that makes some of its values alone."""
    needed: set[SSAValue] = set(outputs)
    ops = []
    for op in reversed(run.ops):
        if not needed.isdisjoint(op.results):
            ops.append(op)
            needed.update(op.operands)
    ops.reverse()
    kept = set(ops)
    segment = Segment(run.segment.layer, run.segment.backward, [op for op in run.segment.ops if op in kept])
    return SegmentRun(segment, ops, inputs_of(ops), list(outputs))


def _rows(sharding: Sharding, inputs: Sequence[SSAValue]) -> tuple[tuple[int, int], ...]:
    """The inputs, by number, that have rows of a micro-batch in their first dimension; and how many."""
    placements = [sharding.placements[value] for value in inputs]
    rows = sharding.batch_rows // sharding.num_parts
    return tuple((i, each.outer * rows) for i, each in enumerate(placements) if each.is_sharded and each.dim == 0)


# Layers that are alike have the same kernel.
@lru_cache(maxsize=256)
def _in_slices(text: str, rows: tuple[tuple[int, int], ...], most: int, *, attends: bool) -> str:
    """A kernel that computes a row in slices where this needs less memory."""
    sliced = compute_in_slices(parse_module(text), dict(rows), most, attends=attends)
    if sliced is None:
        return text
    other = print_module(sliced, locations=False)
    return other if profile_kernel(other).working_bytes < profile_kernel(text).working_bytes else text


def make_segment_runs(
    cut: Cut,
    waits: Waits,
    *,
    recomputes: bool = False,
    in_slices: bool = False,
    gradients_apart: bool = False,
    in_sublayers: bool = False,
) -> list[SegmentRun]:
    """One segment run for each segment, with the values that it reads, and those that it makes for others.

    Args:
        cut: the step, divided between wafers and MemoryX.
        waits: the reduced values that each operation waits for.
        recomputes: whether the backward pass computes a layer's activations again, from what the layer reads.
        in_slices: as of `partition`.
        gradients_apart: as of `partition`.
        in_sublayers: as of `partition`.
    """
    segments = partition(cut, waits, in_slices=in_slices, gradients_apart=gradients_apart, in_sublayers=in_sublayers)
    forward = _repeatable(cut, waits, segments) if recomputes else {}
    work = []
    for segment in segments:
        repeated = cut.sunk | forward.get(segment.layer, frozenset()) if segment.backward else cut.sunk
        ops = closure(segment.ops, repeated)
        work.append(SegmentRun(segment, ops, inputs_of(ops)))
    leaving = _leaving(cut)
    read = {value for item in work for value in item.inputs}
    for item in work:
        made = [result for op in item.segment.ops for result in op.results]
        item.outputs = [value for value in made if value in leaving or value in read]
    return work


def _leaving(cut: Cut) -> set[SSAValue]:
    """The values that leave the wafers."""
    return set(cut.sharding.reduced) | {value for _, value in cut.outputs if cut.sharding.used(value).is_sharded}


def _repeatable(cut: Cut, waits: Waits, segments: Sequence[Segment]) -> Mapping[str, frozenset[Operation]]:
    """By layer, the operations of its forward pass that its backward pass may run again.

    Their results depend on the layer's own inputs alone: random numbers on their key. A value that all wafers combine
    is received once.
    """
    found: dict[str, set[Operation]] = {}
    for segment in segments:
        if not segment.backward and segment.layer != INPUT:
            found.setdefault(segment.layer, set()).update(
                op
                for op in segment.ops
                if not waits.awaited(op) and not any(result in cut.sharding.reduced for result in op.results)
            )
    return {layer: frozenset(ops) for layer, ops in found.items()}


# --- The wafer's program ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaferSchedule:
    """The wafer's part of a plan, and its order, from which MemoryX's programs are made.

    Attributes:
        plan: the wafer's plan.
        batch: the group of the batch.
        work: the segment runs, in order.
        loads: the receptions of weights groups, in order; tokens at the begin of the step have position -1.
        departures: the sendings of reduction groups, in order.
        last_read: by value, the position of the last segment run that reads it.
        loop: the positions of the segment runs that are repeated.
        is_repeatable: whether further rounds would do the same as those of the loop, in all roles.
    """

    plan: plan_pb2.WaferPlan
    batch: plan_pb2.Group
    work: list[SegmentRun]
    loads: list[Load]
    departures: list[Departure]
    last_read: Mapping[SSAValue, int]
    loop: range
    is_repeatable: bool


def schedule_wafer(
    work: WaferWork, sharing: Sharing, numbers: Numbers, order: StepOrder, rounds: Sequence[range]
) -> WaferSchedule:
    """Makes the wafer's program.

    Args:
        work: the segments.
        sharing: the shard of each state and of each operation of MemoryX.
        numbers: gives numbers to groups and values.
        order: how the wafer goes through the segments.
        rounds: the rounds of `order`; or those that it lists, of which the second is then repeated in a loop.
    """
    cut, target, localiser, waits = work.cut, work.target, work.localiser, work.waits
    again = runs_again(work.segments, work.again, order)
    runs = order_segment_runs(work.segments, work.whole, order.micro_batches, rounds, work.closing, again)
    last_read = last_reads(runs)
    longest_stay = max(order.longest_stay, target.prefetch_layers if order.keeps_weights else 1)
    loads = find_loads(cut, sharing, longest_stay, numbers, runs, waits)
    tokens, batch = make_tokens(sharing, numbers), make_batch(cut, numbers, localiser, order.micro_batches)
    departures = find_departures(cut, sharing, target, numbers, localiser, runs, waits, order)
    ensure_releases(cut, sharing, loads, departures, last_read)
    first = [Load(-1, tokens[shard]) for shard in unacknowledged_shards(loads, departures)]
    loads = [*first, *loads]
    assembler = _Assembler(work, numbers, batch, departures)
    plan, times = assembler.plan, len(order.rounds) - len(rounds) + 1
    plan.micro_batches, plan.micro_batches_at_once = order.micro_batches, order.at_once
    plan.kept_every.extend(order.kept_every)
    if order.kept_at_most is not None:
        plan.kept_at_most = order.kept_at_most
    looped = [position for position, run in enumerate(runs) if times > 1 and run.round == 1]
    loop = range(looped[0], looped[-1] + 1) if looped else range(0)
    if loop:
        plan.loop.times = times
    assembler.assemble(runs, loads, loop)
    return WaferSchedule(
        plan=plan,
        batch=batch.group,
        work=runs,
        loads=loads,
        departures=departures,
        last_read=last_read,
        loop=loop,
        is_repeatable=not loop or _is_repeatable(plan, loop, target.prefetch_layers),
    )


def _is_repeatable(plan: plan_pb2.WaferPlan, loop: range, prefetch_layers: int) -> bool:
    """Whether further rounds would do the same as those of the loop, in all roles.

    So it is but for rounds of a few segments, in which weights stay on the wafer or are sent more than a round ahead,
    and where a large value that is made in the first round and sent in the last lies among gradients of each round.
    """
    return prefetch_layers <= len(loop) and _keeps_values(plan) and is_sent_where_it_is_written(plan)


def _keeps_values(plan: plan_pb2.WaferPlan) -> bool:
    """Whether the values that are there when a repetition of the loop begins are there when it ends."""
    groups = {group.id: group for group in plan.groups}
    body, held = body_of(plan.loop), set[int]()
    for instruction in plan.instructions[: body.start]:
        held.update(makes_and_reads(instruction, groups)[0])
        held.difference_update(instruction.run.drops)
    before = frozenset(held)
    for instruction in plan.instructions[body.start : body.stop]:
        held.update(makes_and_reads(instruction, groups)[0])
        held.difference_update(instruction.run.drops)
    return before - held <= set(plan.looped_parts)


class _Assembler:
    """Puts the instructions of a wafer in order."""

    def __init__(self, work: WaferWork, numbers: Numbers, batch: Bundle, departures: Sequence[Departure]) -> None:
        self._cut = work.cut
        self._work = work
        self._numbers = numbers
        # Gradients to which all micro-batches add a part before they are rounded.
        self._sums = [value for rounded in work.closing.values() for value in rounded.inputs]
        self._parts = work.cut.parts.difference(self._sums)
        # Gradients of which each round has a part of its own, which MemoryX adds.
        self._of_rounds = {value for d in departures if d.adds_to for value in d.bundle.values}
        self._groups: dict[int, plan_pb2.Group] = {}
        self.plan = plan_pb2.WaferPlan()
        self._batch, self._departures = batch, departures
        # Of a value that outlasts a round, the parts of all micro-batches are numbered one after the other.
        micro_batches = work.target.micro_batches
        self._lasting = {number for value in self._lasting_values() for number in numbers.parts(value, micro_batches)}

    def _lasting_values(self) -> Iterator[SSAValue]:
        """Yields the values that are divided into parts and outlast a round."""
        yield from self._batch.values
        if (wafers := self._cut.names.wafers) is not None:
            yield func_of(self._cut.module).block.args[wafers]
        made = [value for run in self._work.segments[: self._work.whole] for value in run.outputs]
        gathered = [value for d in self._departures if d.is_gathered for value in d.bundle.values]
        yield from (value for value in (*made, *gathered) if value in self._parts)

    def assemble(self, work: list[SegmentRun], loads: list[Load], loop: range) -> None:
        """Fills the plan. loop: the positions of the segment runs that are repeated."""
        departures = self._departures
        self._receive(self._batch)
        for load in loads:
            if load.position < 0:
                self._receive(load.bundle)
        back = {value: d.bundle for d in departures if d.bundle.group.to_wafers for value in d.bundle.values}
        received: set[int] = set()
        loads_at, departures_at = by_position(loads), by_position(departures)
        for position, item in enumerate(work):
            if loop and position == loop.start:
                self.plan.loop.begin = len(self.plan.instructions)
            if loop and position == loop.stop:
                self.plan.loop.end = len(self.plan.instructions)
            for load in loads_at[position]:
                load.bundle.group.layer = item.segment.label
                self._receive(load.bundle)
            for value in self._work.returned[item.segment]:
                if back[value].id not in received:
                    received.add(back[value].id)
                    self._receive(back[value])
            self._run(item)
            for departure in departures_at[position]:
                departure.bundle.group.layer = item.segment.label
                self._groups[departure.bundle.id] = departure.bundle.group
                self.plan.instructions.add().send.group = departure.bundle.id
        self.plan.groups.extend(self._groups.values())
        used = {instruction.run.kernel for instruction in self.plan.instructions if instruction.HasField("run")}
        self.plan.kernels.extend(kernel for kernel in self._work.kernels if kernel.id in used)
        self.plan.sources.extend(each for each in self._work.sources if each.kernel in used)
        for value in self._sums:
            self.plan.joined.add(
                value=self._numbers.value(value), type=types.to_proto(value), reduction=plan_pb2.REDUCTION_SUM
            )
        kept = {member.value for departure in departures for member in departure.bundle.group.members}
        if self._cut.names.wafers is not None:
            wafers = func_of(self._cut.module).block.args[self._cut.names.wafers]
            numbers = [
                self._numbers.value(wafers, micro_batch) for micro_batch in range(self._work.target.micro_batches)
            ]
            self.plan.number_values.extend(numbers)
            kept.update(numbers)
        kept.update(self._find_looped_parts())
        loaded = {load.bundle.id: self._numbers.values(load.bundle.values) for load in loads}
        add_drops(self.plan.instructions, kept, loaded)

    def _find_looped_parts(self) -> Iterator[int]:
        """Adds to the plan the looped parts of the first repetition. Yields those of the others."""
        body, step = body_of(self.plan.loop), self.plan.micro_batches_at_once
        runs = [instruction.run for instruction in self.plan.instructions[body.start : body.stop]]
        used = {value for run in runs for value in (*run.inputs, *run.outputs)}
        self.plan.looped_parts.extend(sorted(used & self._lasting))
        for repetition in range(1, self.plan.loop.times):
            yield from (value + repetition * step for value in self.plan.looped_parts)

    def _receive(self, bundle: Bundle) -> None:
        self._groups[bundle.id] = bundle.group
        self.plan.instructions.add().receive.group = bundle.id

    def _run(self, item: SegmentRun) -> None:
        kernel = self._work.kernel_of[item.segment]
        for micro_batch in item.micro_batches:
            # All micro-batches have one shape, so they share the kernel; only the numbers of their parts differ.
            run = self.plan.instructions.add().run
            run.kernel = kernel
            run.inputs.extend(self._number(value, micro_batch, item.round) for value in item.inputs)
            run.outputs.extend(self._number(value, micro_batch, item.round) for value in item.outputs)
            run.layer = item.segment.label
            run.micro_batch = micro_batch

    def _number(self, value: SSAValue, micro_batch: int, round: int) -> int:
        if value in self._parts:
            return self._numbers.value(value, micro_batch)
        return self._numbers.value(value, round if value in self._of_rounds else 0)
