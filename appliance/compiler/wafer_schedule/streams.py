"""The groups in which values travel between the wafers and MemoryX, and their positions in the wafer's program."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from xdsl.ir import SSAValue

from appliance.compiler.core.target import Target
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import COALESCE_BYTES, REDUCTIONS, Bundle, Numbers, has_room
from appliance.compiler.partition.layers import Segment, Waits
from appliance.compiler.partition.local import Localiser
from appliance.compiler.partition.shards import Sharing
from appliance.compiler.wafer_schedule.segment_runs import SegmentRun, StepOrder
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.dialect.types import AnyTensorType
from waferbox.links.frame import INLINE_BYTES
from wsc.v1 import plan_pb2


@dataclass(slots=True, eq=False)
class Load:
    """One reception of a weights group. A group that is received twice in a step has two loads.

    Attributes:
        position: the segment run before which it is received.
        bundle: the group.
    """

    position: int
    bundle: Bundle


@dataclass(slots=True, eq=False)
class Departure:
    """The sending of a reduction group, from the buffer in which its segment makes the values.

    Attributes:
        position: the last run of the segment that makes its values, after which the group is sent.
        bundle: the group.
        begin: the first run of that segment, which begins to write the buffer.
        adds_to: number of the group of the first round, to whose values MemoryX adds these; 0: to none.
        is_last: whether its values are complete in MemoryX when this group is there.
    """

    position: int
    bundle: Bundle
    begin: int
    adds_to: int = 0
    is_last: bool = True

    @property
    def is_gathered(self) -> bool:
        """Whether the parts of its values are put one behind the other."""
        return self.bundle.group.reduction == plan_pb2.REDUCTION_GATHER


Timed = TypeVar("Timed", Load, Departure)


def by_position(timed: Iterable[Timed]) -> Mapping[int, list[Timed]]:
    """Loads or departures by the position of their segment run."""
    found: dict[int, list[Timed]] = defaultdict(list)
    for each in timed:
        found[each.position].append(each)
    return found


def last_reads(work: list[SegmentRun]) -> dict[SSAValue, int]:
    """By value, the position of the last segment run that reads it."""
    return {value: position for position, item in enumerate(work) for value in item.inputs}


def find_loads(
    cut: Cut, sharing: Sharing, longest_stay: int, numbers: Numbers, work: list[SegmentRun], waits: Waits
) -> list[Load]:
    """Puts the streamed values into weights groups. Returns their loads, in order.

    longest_stay: a value stays on the wafer between two reads if at most so many runs lie between them.
    """
    reads: dict[SSAValue, list[int]] = {}
    for position, item in enumerate(work):
        for value in item.inputs:
            reads.setdefault(value, []).append(position)
    streamed = [value for value in cut.streamed if value in reads]
    open_bundles: dict[tuple[object, ...], Bundle] = {}
    bundles: list[tuple[tuple[int, ...], Bundle]] = []
    for value in sorted(streamed, key=lambda value: reads[value][0]):
        positions = _load_positions(reads[value], longest_stay)
        shard = sharing.source(value)
        type = types.tensor_type(types.shape(value), types.dtype(value))
        # Values that are loaded once share a group, although they are read in different segment runs: the first read
        # counts. Values that are loaded several times share a group only if all their positions are equal. A value
        # that MemoryX computes late in the step would delay others, so it travels alone.
        key = (shard, positions if len(positions) > 1 else (), value if waits.is_late(value) else None)
        bundle = open_bundles.get(key)
        if bundle is None or not has_room(bundle, type):
            group = plan_pb2.Group(id=numbers.group(), kind=plan_pb2.GROUP_KIND_WEIGHTS, source_shard=shard)
            bundle = open_bundles[key] = Bundle(group)
            bundles.append((positions, bundle))
        bundle.add(numbers, value, type)
    loads = [Load(position, bundle) for positions, bundle in bundles for position in positions]
    return sorted(loads, key=lambda load: load.position)


def _load_positions(reads: list[int], longest_stay: int) -> tuple[int, ...]:
    """The segment runs before which a value is loaded: the first that reads it, and the first after each long gap."""
    # Over a long gap the value is dropped and streamed anew, so that it does not take memory meanwhile.
    positions = [reads[0]]
    for before, now in pairwise(reads):
        if now - before > longest_stay:
            positions.append(now)
    return tuple(positions)


def make_tokens(sharing: Sharing, numbers: Numbers) -> list[Bundle]:
    """By shard, its token: an empty weights group, whose arrival means that the shard has begun the step."""
    return [
        Bundle(plan_pb2.Group(id=numbers.group(), kind=plan_pb2.GROUP_KIND_WEIGHTS, source_shard=shard))
        for shard in range(sharing.num_shards)
    ]


def make_batch(cut: Cut, numbers: Numbers, localiser: Localiser, micro_batches: int) -> Bundle:
    """The group of the batch: all inputs in the batch's order, whether the step reads them or not."""
    bundle = Bundle(plan_pb2.Group(id=numbers.group(), kind=plan_pb2.GROUP_KIND_BATCH))
    arguments = func_of(cut.module).block.args
    for argument in cut.names.inputs:
        value = arguments[argument.argument]
        bundle.add_parts(numbers, value, localiser.type_of(value), micro_batches)
    return bundle


def find_departures(
    cut: Cut,
    sharing: Sharing,
    target: Target,
    numbers: Numbers,
    localiser: Localiser,
    work: list[SegmentRun],
    waits: Waits,
    order: StepOrder,
) -> list[Departure]:
    """Puts the values that leave the wafers into reduction groups. Returns their departures, in order."""
    outputs = {value for _, value in cut.outputs}
    waited = {value for op in cut.wafer_ops for value in waits.returned(op)}  # reduced values that come back
    leaving: dict[Segment, list[_Leaving]] = {}
    for item in work:
        if item.segment not in leaving:
            leaving[item.segment] = [
                _Leaving(value, localiser.type_of(value), group, order)
                for value in item.outputs
                if (group := _reduction_group(cut, sharing, value, value in waited, value in outputs)) is not None
            ]
    open_groups: dict[tuple[object, ...], Departure] = {}
    found: list[Departure] = []
    firsts: dict[SSAValue, int] = {}  # by value: its group of the first round
    begins: dict[Segment, int] = {}
    for position, item in enumerate(work):
        begin = begins.setdefault(item.segment, position)
        for each in leaving[item.segment]:
            if not item.is_last and not each.is_of_round:
                continue
            # A group has values of one segment only, so that their updates begin while the wafer runs the next
            # segments.
            key = (position, *each.key)
            departure = open_groups.get(key)
            if departure is None or not has_room(departure.bundle, each.type, each.most_bytes):
                group = plan_pb2.Group()
                group.CopyFrom(each.group)
                group.id = numbers.group()
                departure = open_groups[key] = Departure(position, Bundle(group), begin)
                if each.is_of_round:
                    departure.begin = position
                    departure.adds_to, departure.is_last = firsts.get(each.value, 0), item.is_last
                found.append(departure)
            if each.is_gathered:
                departure.bundle.add_parts(numbers, each.value, each.type, order.micro_batches)
                departure.bundle.group.nbytes *= target.num_csx
            else:
                departure.bundle.add(numbers, each.value, each.type, item.round if each.is_of_round else 0)
                firsts.setdefault(each.value, departure.bundle.id)
    return sorted(found, key=lambda departure: departure.position)


class _Leaving:
    """A value that leaves the wafers.

    Attributes:
        group: a group with its destinations.
        is_gathered: whether its parts are put one behind the other.
        is_of_round: whether each round sends a part of it, which MemoryX adds.
        most_bytes: up to this size it joins a group of others.
        key: what the values of one group have in common. A gathered tensor has a group of its own.
    """

    def __init__(self, value: SSAValue, type: AnyTensorType, group: plan_pb2.Group, order: StepOrder) -> None:
        self.value, self.type, self.group = value, type, group
        self.is_gathered = group.reduction == plan_pb2.REDUCTION_GATHER
        is_gradient = group.reduction == plan_pb2.REDUCTION_SUM and not group.to_wafers and not group.to_coordinator
        self.is_of_round = order.adds_in_memoryx and is_gradient and types.nbytes(type) > INLINE_BYTES
        # Small gradients are added on the wafer all the same. A group of them that lay in the arena would be written
        # from the first round to the last, beside all others.
        is_apart = order.adds_in_memoryx and is_gradient and not self.is_of_round
        self.most_bytes = INLINE_BYTES if is_apart else COALESCE_BYTES
        self.key = (
            types.dtype(type),
            group.reduction,
            tuple(group.shards),
            group.to_wafers,
            group.to_coordinator,
            value if self.is_gathered else None,
            self.is_of_round,
        )


def _reduction_group(
    cut: Cut, sharing: Sharing, value: SSAValue, to_wafers: bool, to_coordinator: bool
) -> plan_pb2.Group | None:
    """A group with the destinations of a value; None if the value stays on the wafers."""
    group = plan_pb2.Group(kind=plan_pb2.GROUP_KIND_REDUCTION)
    if value not in cut.sharding.reduced:
        group.reduction = plan_pb2.REDUCTION_GATHER
        group.to_coordinator = to_coordinator
        return group if to_coordinator else None
    # With one wafer its part of the batch is the whole, which a shard may read without a reduction.
    group.reduction = REDUCTIONS[cut.sharding.placements[value].reduction or "sum"]
    group.shards.extend(shard for shard in range(sharing.num_shards) if sharing.reads(shard, value))
    group.to_wafers = to_wafers
    group.to_coordinator = to_coordinator
    return group if group.shards or to_wafers or to_coordinator else None


def ensure_releases(
    cut: Cut, sharing: Sharing, loads: Iterable[Load], departures: list[Departure], last_read: Mapping[SSAValue, int]
) -> None:
    """Ensures that each shard receives a message after the wafers' last read of values that it overwrites in place.

    A shard sends weights from the memory of its states, and a wafer on the same host reads them there. Any reduction
    that is sent after the last read shows the shard that it may overwrite them. A shard that would receive no such
    reduction gets a copy of the smallest.
    """
    for shard in range(sharing.num_shards):
        states = set(sharing.states[shard])
        overwritten = [
            last_read[value]
            for load in loads
            if load.bundle.group.source_shard == shard and load.bundle.nbytes > INLINE_BYTES
            for value in load.bundle.values
            if value in cut.new_states or value not in states
        ]
        last = max(overwritten, default=-1)
        after = [departure for departure in departures if departure.position >= last]
        if last >= 0 and not any(shard in departure.bundle.group.shards for departure in after):
            fitting = [departure for departure in after if not departure.is_gathered]
            if fitting:
                smallest = min(fitting, key=lambda departure: departure.bundle.nbytes)
                smallest.bundle.group.shards.append(shard)
                smallest.bundle.group.shards.sort()


def unacknowledged_shards(loads: Iterable[Load], departures: Iterable[Departure]) -> list[int]:
    """Shards to which a group is sent whose buffer is written before any load from the shard in the same step.

    Such a shard may still read what was sent from the buffer in the step before. A load from a shard shows that it has
    ended that step; without one the wafer waits for the shard's token.
    """
    first: dict[int, int] = {}  # by shard: the position of its first load
    for load in loads:
        shard = load.bundle.group.source_shard
        first[shard] = min(load.position, first.get(shard, load.position))
    unacknowledged: dict[int, None] = {}
    for departure in departures:
        for shard in departure.bundle.group.shards:
            if shard not in first or first[shard] > departure.begin:
                unacknowledged.setdefault(shard)
    return list(unacknowledged)
