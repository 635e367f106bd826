"""The memory of each role's links between hosts, in addition to its own memory. See LINK MEMORY in plan.proto.

It follows from the bounds of a link: the window of weights groups, the arena from which gradients are sent, the
worker's ring of batches, and the queue of the gRPC lane.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Final

from waferbox.links.elements import aligned
from waferbox.links.frame import INLINE_BYTES
from waferbox.links.grpc_bounds import receiving_bytes, sending_bytes
from waferbox.runtime.schedule import (
    BATCH_SLOTS,
    MAX_RUN_AHEAD_STEPS,
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
    """Sets the fields of LINK MEMORY, which follow from the rest of the plan."""
    plan.wafer.link_bytes = _wafer_bytes(plan.wafer)
    for part in plan.memoryx:
        part.link_bytes = _shard_bytes(part)
    plan.swarmx.link_bytes = _swarmx_bytes(plan.swarmx, plan.num_csx)
    plan.swarmx.relay_bytes = _relay_bytes(plan.swarmx, plan.num_csx)


def _wafer_bytes(plan: plan_pb2.WaferPlan) -> int:
    groups = {group.id: group for group in plan.groups}
    batch = sum(group.nbytes for group in plan.groups if group.kind == plan_pb2.GROUP_KIND_BATCH)
    reduced = [group.nbytes for group in plan.groups if _is_reduction(group) and group.to_wafers]
    sent = _sent_bytes(groups[i.send.group] for i in plan.instructions if i.HasField("send"))
    return (
        batch
        + receiving_bytes((BATCH_SLOTS - 1) * batch, batch)
        + receiving_bytes(sum(reduced), max(reduced, default=0))
        + max(_weights_at(plan, groups), default=0)
        + sending_bytes(sent)
    )


def _weights_at(plan: plan_pb2.WaferPlan, groups: Mapping[int, plan_pb2.Group]) -> Iterator[int]:
    """By instruction, the bytes of weights that are still to be read, and of those that may have arrived early."""
    positions: dict[int, list[int]] = defaultdict(list)  # by shard: where its weights are received
    sizes: dict[int, list[int]] = defaultdict(list)
    last_sent: dict[int, int] = {}  # by shard
    for position, instruction in enumerate(plan.instructions):
        match instruction.WhichOneof("kind"):
            case "receive":
                group = groups[instruction.receive.group]
                if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                    positions[group.source_shard].append(position)
                    sizes[group.source_shard].append(group.nbytes)
            case "send":
                last_sent.update(dict.fromkeys(groups[instruction.send.group].shards, position))
    largest = max((nbytes for stream in sizes.values() for nbytes in stream), default=0)
    held: dict[int, set[int]] = {}  # by group: its values that are still to be read
    for position, instruction in enumerate(plan.instructions):
        if instruction.HasField("receive"):
            group = groups[instruction.receive.group]
            if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                held[group.id] = {member.value for member in group.members}
        ahead = 0
        for shard, stream in sizes.items():
            taken = bisect_right(positions[shard], position)
            following = stream[taken : taken + WEIGHTS_WINDOW]
            if shard not in last_sent:
                # The shard waits for nothing from the wafers, so it may be any number of steps ahead.
                following += islice(cycle(stream), WEIGHTS_WINDOW)
            elif position >= last_sent[shard]:
                # The shard has received everything of this step, and waits for a message of the next.
                following += stream[:WEIGHTS_WINDOW]
            ahead += sum(following[:WEIGHTS_WINDOW])
        yield sum(groups[group].nbytes for group in held) + receiving_bytes(ahead, largest)
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
    groups = {group.id: group for group in plan.groups}
    sent = [groups[i.send.group] for i in plan.instructions if i.HasField("send")]
    weights = [group.nbytes for group in sent if group.kind == plan_pb2.GROUP_KIND_WEIGHTS]
    return (
        receiving_bytes(gradients + others, max((group.nbytes for group in reductions), default=0))
        + receiving_bytes(_EXCHANGE_STEPS * sum(from_peers), max(from_peers, default=0))
        + sending_bytes(_most_in_window(weights))
        + sending_bytes(outputs * MAX_RUN_AHEAD_STEPS)
        + sending_bytes(_EXCHANGE_STEPS * to_peers) * len(peers)
    )


def _swarmx_bytes(plan: plan_pb2.SwarmXPlan, num_children: int) -> int:
    """The bytes of a node that has all wafers as its children; a node in a tree has fewer."""
    in_arena = {place.group for place in plan.arena.places}
    reductions = [group for group in plan.groups if _is_reduction(group)]
    from_child = plan.arena.nbytes + _sent_bytes(group for group in reductions if group.id not in in_arena)
    largest_part = max(map(part_bytes, reductions), default=0)
    reduced_down = sum(group.nbytes for group in reductions if group.to_wafers)
    to_coordinator = sum(group.nbytes for group in reductions if group.to_coordinator)
    to_shards: dict[int, int] = defaultdict(int)
    for group in reductions:
        for shard in group.shards:
            to_shards[shard] += group.nbytes
    weights: dict[int, list[int]] = defaultdict(list)
    for group in plan.groups:
        if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
            weights[group.source_shard].append(group.nbytes)
    in_window = {shard: _most_in_window(sizes) for shard, sizes in weights.items()}
    return (
        num_children * receiving_bytes(from_child, largest_part, at_once=True)
        + sum(receiving_bytes(in_window[shard], max(sizes), at_once=True) for shard, sizes in weights.items())
        + num_children * sending_bytes(sum(in_window.values()) + reduced_down)
        + sum(map(sending_bytes, to_shards.values()))
        + sending_bytes(to_coordinator * MAX_RUN_AHEAD_STEPS)
    )


def _relay_bytes(plan: plan_pb2.SwarmXPlan, num_children: int) -> int:
    down = {g.id: g for g in plan.groups if g.kind == plan_pb2.GROUP_KIND_WEIGHTS or g.to_wafers}
    places = sum(aligned(group.nbytes) for group in down.values() if group.nbytes > INLINE_BYTES)
    # A node that adds has the sums in its own memory, on whatever lane it sends them.
    return max(places, plan.arena.nbytes if num_children == 1 else 0)


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
