"""Makes the wafer's program in weight streaming: receive, run the segments, send values to be reduced, drop values.

Forward and backward pass are in the order of the trace. Weights are received just before the first segment that reads
them, and stay if they are read again soon. Gradients are sent after the segment that makes them, which is after that
segment's last read of the weights.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from xdsl.ir import SSAValue

from appliance.compiler.core.target import Target
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Bundle, KernelTable, Numbers
from appliance.compiler.partition.layers import Segment, Waits, closure, inputs_of, partition
from appliance.compiler.partition.local import Localiser
from appliance.compiler.partition.shards import Sharing
from appliance.compiler.wafer_schedule.segment_runs import (
    SegmentRun,
    num_of_whole_batch,
    order_segment_runs,
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
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.text.printer import print_module
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
    for instruction in reversed(instructions):
        match instruction.WhichOneof("kind"):
            case "receive":
                live.difference_update(loads.get(instruction.receive.group, ()))
            case "run":
                read = list(dict.fromkeys(instruction.run.inputs))
                instruction.run.drops.extend(value for value in read if value not in live)
                live.update(read)


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
        localiser: makes the kernels.
        whole_batch_first: whether most segments are run with all micro-batches before the next segment is.
    """

    plan: plan_pb2.WaferPlan
    batch: plan_pb2.Group
    work: list[SegmentRun]
    loads: list[Load]
    departures: list[Departure]
    last_read: Mapping[SSAValue, int]
    localiser: Localiser
    whole_batch_first: bool


def schedule_wafer(cut: Cut, sharing: Sharing, target: Target, numbers: Numbers, at_once: int) -> WaferSchedule:
    """Makes the wafer's program.

    Args:
        cut: the step, divided between wafers and MemoryX.
        sharing: the shard of each state and of each operation of MemoryX.
        target: the cluster.
        numbers: gives numbers to groups and values.
        at_once: number of micro-batches that go through the layers together.
    """
    localiser = Localiser(cut.sharding)
    waits = Waits(cut)
    segments = make_segment_runs(cut, waits)
    # Parts of several micro-batches are added in float32 and rounded once: see `partition/precision.py`.
    rounding = [op for op in cut.wafer_ops if target.micro_batches > 1 and op.results[0] in cut.sharding.rounded]
    closing = take_out_rounding(segments, rounding)
    whole = num_of_whole_batch(segments, waits, closing)
    work = order_segment_runs(segments, whole, target.micro_batches, at_once, closing)
    last_read = last_reads(work)
    loads = find_loads(cut, sharing, target, numbers, work, waits)
    tokens, batch = make_tokens(sharing, numbers), make_batch(cut, numbers, localiser, target.micro_batches)
    departures = find_departures(cut, sharing, target, numbers, localiser, work, waits)
    ensure_releases(cut, sharing, loads, departures, last_read)
    first = [Load(-1, tokens[shard]) for shard in unacknowledged_shards(loads, departures)]
    loads = [*first, *loads]
    sums = [value for rounded in closing.values() for value in rounded.inputs]
    assembler = _Assembler(cut, numbers, localiser, waits, target.micro_batches, sums)
    assembler.assemble(batch, work, loads, departures)
    assembler.plan.micro_batches, assembler.plan.micro_batches_at_once = target.micro_batches, at_once
    return WaferSchedule(
        plan=assembler.plan,
        batch=batch.group,
        work=work,
        loads=loads,
        departures=departures,
        last_read=last_read,
        localiser=localiser,
        whole_batch_first=2 * whole > len(segments),
    )


def make_segment_runs(cut: Cut, waits: Waits) -> list[SegmentRun]:
    """One segment run for each segment, with the values that it reads, and those that it makes for others."""
    work = []
    for segment in partition(cut, waits):
        ops = closure(segment.ops, cut.sunk)
        work.append(SegmentRun(segment, ops, inputs_of(ops)))
    leaving = set(cut.sharding.reduced) | {value for _, value in cut.outputs if cut.sharding.used(value).is_sharded}
    read = {value for item in work for value in item.inputs}
    for item in work:
        made = [result for op in item.segment.ops for result in op.results]
        item.outputs = [value for value in made if value in leaving or value in read]
    return work


class _Assembler:
    """Puts the instructions of a wafer in order."""

    def __init__(
        self,
        cut: Cut,
        numbers: Numbers,
        localiser: Localiser,
        waits: Waits,
        micro_batches: int,
        sums: Collection[SSAValue],
    ) -> None:
        """sums: gradients to which all micro-batches add a part before they are rounded."""
        self._cut = cut
        self._numbers = numbers
        self._localiser = localiser
        self._waits = waits
        self._micro_batches = micro_batches
        self._sums = sums
        self._parts = cut.parts.difference(sums)
        self._kernels = KernelTable()
        self._numbers_of_kernels: dict[Segment, int] = {}
        self._groups: dict[int, plan_pb2.Group] = {}
        self.plan = plan_pb2.WaferPlan()

    def assemble(self, batch: Bundle, work: list[SegmentRun], loads: list[Load], departures: list[Departure]) -> None:
        """Fills the plan."""
        self._receive(batch)
        for load in loads:
            if load.position < 0:
                self._receive(load.bundle)
        back = {value: d.bundle for d in departures if d.bundle.group.to_wafers for value in d.bundle.values}
        received: set[int] = set()
        loads_at, departures_at = by_position(loads), by_position(departures)
        for position, item in enumerate(work):
            for load in loads_at[position]:
                load.bundle.group.layer = item.segment.label
                self._receive(load.bundle)
            for op in item.ops:
                for value in self._waits.returned(op):
                    if back[value].id not in received:
                        received.add(back[value].id)
                        self._receive(back[value])
            self._run(item)
            for departure in departures_at[position]:
                departure.bundle.group.layer = item.segment.label
                self._groups[departure.bundle.id] = departure.bundle.group
                self.plan.instructions.add().send.group = departure.bundle.id
        self.plan.groups.extend(self._groups.values())
        self.plan.kernels.extend(self._kernels.messages())
        for value in self._sums:
            self.plan.joined.add(
                value=self._numbers.value(value), type=types.to_proto(value), reduction=plan_pb2.REDUCTION_SUM
            )
        kept = {member.value for departure in departures for member in departure.bundle.group.members}
        if self._cut.names.wafers is not None:
            wafers = func_of(self._cut.module).block.args[self._cut.names.wafers]
            numbers = [self._numbers.value(wafers, micro_batch) for micro_batch in range(self._micro_batches)]
            self.plan.number_values.extend(numbers)
            kept.update(numbers)
        loaded = {load.bundle.id: self._numbers.values(load.bundle.values) for load in loads}
        add_drops(self.plan.instructions, kept, loaded)

    def _receive(self, bundle: Bundle) -> None:
        self._groups[bundle.id] = bundle.group
        self.plan.instructions.add().receive.group = bundle.id

    def _run(self, item: SegmentRun) -> None:
        kernel = self._numbers_of_kernels.get(item.segment)
        if kernel is None:
            module = self._localiser.kernel(item.ops, item.inputs, item.outputs)
            kernel = self._numbers_of_kernels[item.segment] = self._kernels.number(
                print_module(module, locations=False)
            )
        for micro_batch in item.micro_batches:
            # All micro-batches have one shape, so they share the kernel; only the numbers of their parts differ.
            run = self.plan.instructions.add().run
            run.kernel = kernel
            run.inputs.extend(self._number(value, micro_batch) for value in item.inputs)
            run.outputs.extend(self._number(value, micro_batch) for value in item.outputs)
            run.layer = item.segment.label
            run.micro_batch = micro_batch

    def _number(self, value: SSAValue, micro_batch: int) -> int:
        return self._numbers.value(value, micro_batch if value in self._parts else 0)
