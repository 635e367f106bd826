"""The memory of each role's links between hosts, in addition to its own memory. See LINK MEMORY in plan.proto.

It follows from the bounds of a link: the window of weights groups, the arena from which gradients are sent, the
worker's ring of batches, and the queue of the gRPC lane.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Final

from waferbox.limits import MAX_RUN_AHEAD_STEPS
from waferbox.links.elements import aligned
from waferbox.links.frame import INLINE_BYTES
from waferbox.links.grpc_bounds import receiving_bytes, sending_bytes
from waferbox.runtime.schedule import (
    BATCH_SLOTS,
    WEIGHTS_WINDOW,
    is_for_coordinator_only,
    part_bytes,
)
from wsc.v1 import plan_pb2

# The steps whose groups for the coordinator alone a wafer may have sent: only weights bound how far it runs ahead.
_OUTPUT_STEPS: Final = WEIGHTS_WINDOW + 1
# A shard may be in the next step while another has not read its exchanges of this step.
_EXCHANGE_STEPS: Final = 2


def set_link_bytes(plan: plan_pb2.Plan) -> None:
    """Sets the fields of LINK MEMORY, which follow from the rest of the plan. A single wafer has no SwarmX node."""
    plan.wafer.link_bytes = _wafer_bytes(plan.wafer, is_single=plan.num_csx == 1)
    for part in plan.memoryx:
        part.link_bytes = _shard_bytes(part)
    is_reduced = plan.num_csx > 1
    plan.swarmx.link_bytes = _swarmx_bytes(plan) if is_reduced else 0
    plan.swarmx.relay_bytes = _relay_bytes(plan.swarmx) if is_reduced else 0


def _wafer_bytes(plan: plan_pb2.WaferPlan, *, is_single: bool) -> int:
    groups = {group.id: group for group in plan.groups}
    batch = sum(group.nbytes for group in plan.groups if group.kind == plan_pb2.GROUP_KIND_BATCH)
    reduced = [group.nbytes for group in plan.groups if _is_reduction(group) and group.to_wafers and not is_single]
    sent = [groups[i.send.group] for i in plan.instructions if i.HasField("send")]
    return (
        batch
        + receiving_bytes((BATCH_SLOTS - 1) * batch, batch)
        + receiving_bytes(sum(reduced), max(reduced, default=0))
        + max(_weights_at(plan, groups, is_single=is_single), default=0)
        + (_to_receivers(sent) if is_single else sending_bytes(_sent_bytes(sent)))
    )


def _to_receivers(sent: Iterable[plan_pb2.Group]) -> int:
    """The bytes of reduction groups on their way to the shards and the coordinator, over a link each."""
    to_shards: dict[int, int] = defaultdict(int)
    to_coordinator = 0
    for group in sent:
        for shard in group.shards:
            to_shards[shard] += group.nbytes
        to_coordinator += group.nbytes if group.to_coordinator else 0
    return sum(map(sending_bytes, to_shards.values())) + sending_bytes(to_coordinator * MAX_RUN_AHEAD_STEPS)


def _weights_at(plan: plan_pb2.WaferPlan, groups: Mapping[int, plan_pb2.Group], *, is_single: bool) -> Iterator[int]:
    """By instruction, the bytes of weights that are still to be read, and of those that may have arrived early.

    is_single: whether each shard has a link of its own to the wafer.
    """
    streams: dict[int, list[int]] = defaultdict(list)  # by shard: the sizes of its weights, in order
    last_sent: dict[int, int] = {}  # by shard
    for position, instruction in enumerate(plan.instructions):
        match instruction.WhichOneof("kind"):
            case "receive":
                group = groups[instruction.receive.group]
                if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                    streams[group.source_shard].append(group.nbytes)
            case "send":
                last_sent.update(dict.fromkeys(groups[instruction.send.group].shards, position))
    largest = max((nbytes for stream in streams.values() for nbytes in stream), default=0)
    taken = dict.fromkeys(streams, 0)
    # A shard that waits for nothing from the wafers may be any number of steps ahead.
    following = {
        shard: [] if shard in last_sent else list(islice(cycle(stream), WEIGHTS_WINDOW))
        for shard, stream in streams.items()
    }

    def early_bytes(shard: int) -> int:
        coming = streams[shard][taken[shard] : taken[shard] + WEIGHTS_WINDOW]
        return sum((coming + following[shard])[:WEIGHTS_WINDOW])

    early = {shard: early_bytes(shard) for shard in streams}
    held: dict[int, set[int]] = {}  # by group: its values that are still to be read
    for position, instruction in enumerate(plan.instructions):
        changed: Collection[int] = ()  # the shards of which other weights may arrive early
        match instruction.WhichOneof("kind"):
            case "receive":
                group = groups[instruction.receive.group]
                if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                    held[group.id] = {member.value for member in group.members}
                    changed = (group.source_shard,)
                    taken[group.source_shard] += 1
            case "send":
                # A shard that has received everything of this step waits for a message of the next.
                shards = groups[instruction.send.group].shards
                changed = [shard for shard in shards if shard in streams and last_sent[shard] == position]
                following.update((shard, streams[shard][:WEIGHTS_WINDOW]) for shard in changed)
        early.update((shard, early_bytes(shard)) for shard in changed)
        links = early.values() if is_single else [sum(early.values())]
        yield sum(groups[group].nbytes for group in held) + sum(receiving_bytes(coming, largest) for coming in links)
        if instruction.HasField("run"):
            read = set(instruction.run.drops)
            held = {group: left for group, values in held.items() if (left := values - read)}


def _shard_bytes(plan: plan_pb2.MemoryXPlan) -> int:
    in_arena = {place.group for place in plan.arena.places}
    reductions = [group for group in plan.groups if _is_reduction(group)]
    gradients = min(plan.arena.nbytes, sum(aligned(group.nbytes) for group in reductions if group.id in in_arena))
    others = sum(group.nbytes for group in reductions if group.id not in in_arena)
    exchanges = [group for group in plan.groups if group.kind == plan_pb2.GROUP_KIND_EXCHANGE]
    from_peers = [group.nbytes for group in exchanges if group.source_shard != plan.shard]
    to_peers = sum(group.nbytes for group in exchanges if group.source_shard == plan.shard)
    peers = {shard for group in exchanges for shard in (*group.shards, group.source_shard)} - {plan.shard}
    outputs = sum(group.nbytes for group in plan.groups if group.kind == plan_pb2.GROUP_KIND_OUTPUT)
    return (
        receiving_bytes(gradients + others, max((group.nbytes for group in reductions), default=0))
        + receiving_bytes(_EXCHANGE_STEPS * sum(from_peers), max(from_peers, default=0))
        + sending_bytes(_most_in_window(_weights_sent(plan)))
        + sending_bytes(outputs * MAX_RUN_AHEAD_STEPS)
        + sending_bytes(_EXCHANGE_STEPS * to_peers) * len(peers)
    )


def _swarmx_bytes(plan: plan_pb2.Plan) -> int:
    """The bytes of a node that has all wafers as its children; a node in a tree has fewer."""
    arena, num_children = plan.swarmx.arena, plan.num_csx
    in_arena = {place.group for place in arena.places}
    reductions = [group for group in plan.swarmx.groups if _is_reduction(group)]
    from_child = arena.nbytes + _sent_bytes(group for group in reductions if group.id not in in_arena)
    largest_part = max(map(part_bytes, reductions), default=0)
    reduced_down = sum(group.nbytes for group in reductions if group.to_wafers)
    weights = [sizes for part in plan.memoryx if (sizes := _weights_sent(part))]
    in_windows = [_most_in_window(sizes) for sizes in weights]
    return (
        num_children * receiving_bytes(from_child, largest_part, at_once=True)
        + sum(receiving_bytes(b, max(sizes), at_once=True) for b, sizes in zip(in_windows, weights, strict=True))
        + num_children * sending_bytes(sum(in_windows) + reduced_down)
        + _to_receivers(reductions)
    )


def _relay_bytes(plan: plan_pb2.SwarmXPlan) -> int:
    # A node that adds has the sums in its own memory, on whatever lane it sends them.
    down = {g.id: g for g in plan.groups if g.kind == plan_pb2.GROUP_KIND_WEIGHTS or g.to_wafers}
    return sum(aligned(group.nbytes) for group in down.values() if group.nbytes > INLINE_BYTES)


def _weights_sent(plan: plan_pb2.MemoryXPlan) -> list[int]:
    """The sizes of the weights groups that a shard sends, in order."""
    groups = {group.id: group for group in plan.groups}
    sent = [groups[i.send.group] for i in plan.instructions if i.HasField("send")]
    return [group.nbytes for group in sent if group.kind == plan_pb2.GROUP_KIND_WEIGHTS]


def _is_reduction(group: plan_pb2.Group) -> bool:
    return group.kind == plan_pb2.GROUP_KIND_REDUCTION


def _sent_bytes(groups: Iterable[plan_pb2.Group]) -> int:
    """The most bytes of reduction groups that a wafer has sent and the receiver has not taken.

    A group is sent again only after it has been taken, unless it is for the coordinator alone.
    """
    return sum(part_bytes(group) * (_OUTPUT_STEPS if is_for_coordinator_only(group) else 1) for group in groups)


def _most_in_window(sizes: Sequence[int]) -> int:
    """The most bytes in a window of a shard's weights groups, also across the end of a step."""
    around = list(islice(cycle(sizes), len(sizes) + WEIGHTS_WINDOW))
    windows = (around[begin : begin + WEIGHTS_WINDOW] for begin in range(len(sizes)))
    return max(map(sum, windows), default=0)
