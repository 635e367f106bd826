"""The groups in which values travel between the wafers and MemoryX, and when in the wafer's program they do."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from xdsl.ir import SSAValue

from appliance.compiler.core.target import Target
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import REDUCTIONS, Bundle, Numbers, has_room
from appliance.compiler.partition.layers import Segment, Waits
from appliance.compiler.partition.local import Localiser
from appliance.compiler.partition.shards import Sharing
from appliance.compiler.wafer_schedule.segment_runs import SegmentRun
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import func_of
from waferbox.links.frame import INLINE_BYTES
from wsc.v1 import plan_pb2


@dataclass(slots=True, eq=False)
class Load:
    """A weights group, received before a turn. A group that is loaded twice has two of them."""

    position: int
    bundle: Bundle


@dataclass(slots=True, eq=False)
class Departure:
    """A reduction group, sent after the last turn of the segment that makes its values, in place."""

    position: int
    bundle: Bundle
    begin: int  # position of the segment's first turn, in which it is written first


Timed = TypeVar("Timed", Load, Departure)


def by_position(timed: Iterable[Timed]) -> Mapping[int, list[Timed]]:
    """Loads or departures by the turn that they belong to."""
    found: dict[int, list[Timed]] = defaultdict(list)
    for each in timed:
        found[each.position].append(each)
    return found


def last_reads(work: list[SegmentRun]) -> dict[SSAValue, int]:
    """The last turn that reads each value."""
    return {value: position for position, item in enumerate(work) for value in item.inputs}


def find_loads(
    cut: Cut, sharing: Sharing, target: Target, numbers: Numbers, work: list[SegmentRun], waits: Waits
) -> list[Load]:
    """Weights groups, in order."""
    reads: dict[SSAValue, list[int]] = {}
    for position, item in enumerate(work):
        for value in item.inputs:
            reads.setdefault(value, []).append(position)
    streamed = [value for value in cut.streamed if value in reads]
    open_bundles: dict[tuple[object, ...], Bundle] = {}
    bundles: list[tuple[tuple[int, ...], Bundle]] = []
    for value in sorted(streamed, key=lambda value: reads[value][0]):
        positions = _load_positions(reads[value], target.prefetch_layers)
        shard = sharing.source(value)
        type = types.tensor_type(types.shape(value), types.dtype(value))
        # Single loads may differ in when they are needed: the earliest counts. What comes late travels alone.
        key = (shard, positions if len(positions) > 1 else (), value if waits.is_late(value) else None)
        bundle = open_bundles.get(key)
        if bundle is None or not has_room(bundle, type):
            group = plan_pb2.Group(id=numbers.group(), kind=plan_pb2.GROUP_KIND_WEIGHTS, source_shard=shard)
            bundle = open_bundles[key] = Bundle(group)
            bundles.append((positions, bundle))
        bundle.add(numbers, value, type)
    loads = [Load(position, bundle) for positions, bundle in bundles for position in positions]
    return sorted(loads, key=lambda load: load.position)


def _load_positions(reads: list[int], prefetch_layers: int) -> tuple[int, ...]:
    """The turns before which a value is loaded: the first that reads it, and those after a long gap."""
    positions = [reads[0]]
    for before, now in pairwise(reads):
        if now - before > prefetch_layers:
            positions.append(now)
    return tuple(positions)


def make_tokens(sharing: Sharing, numbers: Numbers) -> list[Bundle]:
    """By shard: an empty weights group, which says that the shard has begun the step."""
    return [
        Bundle(plan_pb2.Group(id=numbers.group(), kind=plan_pb2.GROUP_KIND_WEIGHTS, source_shard=shard))
        for shard in range(sharing.num_shards)
    ]


def make_batch(cut: Cut, numbers: Numbers, localiser: Localiser, micro_batches: int) -> Bundle:
    """All inputs, in the order of the batch, whether the step reads them or not."""
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
) -> list[Departure]:
    """Reduction groups, in order."""
    outputs = {value for _, value in cut.outputs}
    waited = {value for op in cut.wafer_ops for value in waits.back(op)}
    open_groups: dict[tuple[object, ...], Departure] = {}
    found: list[Departure] = []
    begins: dict[Segment, int] = {}
    for position, item in enumerate(work):
        begins.setdefault(item.segment, position)
        for value in item.outputs if item.is_last else ():
            group = _reduction_group(cut, sharing, value, value in waited, value in outputs)
            if group is None:
                continue
            type = localiser.type_of(value)
            gathered = group.reduction == plan_pb2.REDUCTION_GATHER
            # What a segment makes leaves with it: updates begin while the wafer goes on. A gathered tensor is alone.
            key = (
                types.dtype(type),
                group.reduction,
                tuple(group.shards),
                group.to_wafers,
                group.to_coordinator,
                position,
                value if gathered else None,
            )
            departure = open_groups.get(key)
            if departure is None or not has_room(departure.bundle, type):
                group.id = numbers.group()
                departure = open_groups[key] = Departure(position, Bundle(group), begins[item.segment])
                found.append(departure)
            if gathered:
                departure.bundle.add_parts(numbers, value, type, target.micro_batches)
                group.nbytes *= target.num_csx
            else:
                departure.bundle.add(numbers, value, type)
    return sorted(found, key=lambda departure: departure.position)


def _reduction_group(
    cut: Cut, sharing: Sharing, value: SSAValue, to_wafers: bool, to_coordinator: bool
) -> plan_pb2.Group | None:
    """Where a value goes from the wafers; None if it stays there."""
    group = plan_pb2.Group(kind=plan_pb2.GROUP_KIND_REDUCTION)
    if value not in cut.sharding.reduced:
        group.reduction = plan_pb2.REDUCTION_GATHER
        group.to_coordinator = to_coordinator
        return group if to_coordinator else None
    # On one wafer a part of the batch is whole too, and may be wanted as such.
    group.reduction = REDUCTIONS[cut.sharding.placements[value].reduction or "sum"]
    group.shards.extend(shard for shard in range(sharing.num_shards) if sharing.reads(shard, value))
    group.to_wafers = to_wafers
    group.to_coordinator = to_coordinator
    return group if group.shards or to_wafers or to_coordinator else None


def release(
    cut: Cut, sharing: Sharing, loads: Iterable[Load], departures: list[Departure], last_read: Mapping[SSAValue, int]
) -> None:
    """Lets every shard hear from the wafers when they have read what it is going to overwrite in place.

    Any reduction that is sent after the last read says so. A shard that would get none is sent one more copy of one.
    """
    for shard in range(sharing.num_shards):
        overwritten = [
            last_read[value]
            for load in loads
            if load.bundle.group.source_shard == shard and load.bundle.nbytes > INLINE_BYTES
            for value in load.bundle.values
            if value in cut.new_states or value not in sharing.states[shard]
        ]
        last = max(overwritten, default=-1)
        after = [departure for departure in departures if departure.position >= last]
        if last >= 0 and not any(shard in departure.bundle.group.shards for departure in after):
            fitting = [d for d in after if d.bundle.group.reduction != plan_pb2.REDUCTION_GATHER]
            if fitting:
                smallest = min(fitting, key=lambda departure: departure.bundle.nbytes)
                smallest.bundle.group.shards.append(shard)
                smallest.bundle.group.shards.sort()


def unacknowledged_shards(loads: Iterable[Load], departures: Iterable[Departure]) -> list[int]:
    """Shards that are sent something from a buffer that is written before the wafer has heard of them in this step.

    What was sent to them in the step before may still be read: the wafer waits for the shard's token first.
    """
    unheard = []
    for departure in departures:
        heard = {load.bundle.group.source_shard for load in loads if load.position <= departure.begin}
        unheard += [s for s in departure.bundle.group.shards if s not in heard and s not in unheard]
    return unheard
