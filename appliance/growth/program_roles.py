"""Wafers and MemoryX in a simulation: their instructions one after the other, with the credit that bounds run-ahead."""

from collections import defaultdict

from appliance.growth.cluster import Cluster
from appliance.growth.events import Process
from appliance.growth.swarmx_role import Tree
from nodes.steps.arena import ArenaCounts
from nodes.steps.schedule import WEIGHTS_CREDIT_BATCH, WEIGHTS_WINDOW, is_for_coordinator_only
from wsc.v1 import plan_pb2


def run_wafer(cluster: Cluster, tree: Tree, num_steps: int) -> Process:
    """As `wafer/wafer_program.py`. Batches are there: workers are ahead."""
    plan, host, frame_seconds = cluster.plan.wafer, cluster.wafer, cluster.rates.frame_seconds
    groups = {group.id: group for group in plan.groups}
    homes = {member.value: group.id for group in plan.groups for member in group.members if _is_sent(group)}
    counts = ArenaCounts(plan.arena)
    received: dict[int, int] = defaultdict(int)
    taken: dict[int, int] = defaultdict(int)
    for step in range(1, num_steps + 1):
        for instruction in plan.instructions:
            match instruction.WhichOneof("kind"):
                case "receive":
                    group = groups[instruction.receive.group]
                    if group.kind == plan_pb2.GROUP_KIND_BATCH:
                        continue
                    received[group.id] += 1
                    yield cluster.arrived(host, group.id), received[group.id]
                    yield frame_seconds
                    if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                        shard = group.source_shard
                        taken[shard] += 1
                        if taken[shard] % WEIGHTS_CREDIT_BATCH == 0:
                            yield frame_seconds
                            tree.send_credit(shard, taken[shard])
                case "run":
                    written = {homes[value] for value in instruction.run.outputs if value in homes}
                    for count in sorted(c for group in written if (c := counts.awaited(group)) is not None):
                        yield tree.wafer_released, counts.count(count, step)
                    yield host.work(cluster.costs.wafer[instruction.run.kernel])
                case "send":
                    group = groups[instruction.send.group]
                    awaited = counts.awaited(group.id)
                    if awaited is not None:
                        yield tree.wafer_released, counts.count(awaited, step)
                    yield frame_seconds
                    if not is_for_coordinator_only(group):
                        tree.send_up(group, step)
        cluster.step_ends.append(cluster.clock.now)


def run_shard(cluster: Cluster, tree: Tree, shard: int, num_steps: int) -> Process:
    """As `memoryx/memoryx_program.py`."""
    plan, host, frame_seconds = cluster.plan.memoryx[shard], cluster.shards[shard], cluster.rates.frame_seconds
    groups = {group.id: group for group in plan.groups}
    counts = ArenaCounts(plan.arena)
    received: dict[int, int] = defaultdict(int)
    taken = [i.receive.group for i in plan.instructions if i.HasField("receive")]
    from_arena = [group for group in taken if group in counts.offsets]
    borrowed: int | None = None
    sent = 0

    def release(step: int) -> None:
        nonlocal borrowed
        told = counts.told_after(borrowed, from_arena) if borrowed is not None else None
        borrowed = None
        if told is not None:
            tree.release(shard, counts.count(told, step))

    for step in range(1, num_steps + 1):
        for instruction in plan.instructions:
            match instruction.WhichOneof("kind"):
                case "receive":
                    release(step)
                    group = groups[instruction.receive.group]
                    received[group.id] += 1
                    yield cluster.arrived(host, group.id), received[group.id]
                    yield host.work(frame_seconds)
                    borrowed = group.id if group.id in counts.offsets else None
                case "run":
                    yield host.work(cluster.costs.memoryx[shard][instruction.run.kernel])
                case "send":
                    release(step)
                    group = groups[instruction.send.group]
                    yield host.work(frame_seconds)
                    if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                        # Credit comes for several groups at once.
                        yield cluster.credit[shard], sent - WEIGHTS_WINDOW + 1
                        sent += 1
                        tree.send_weights(shard, group)
                    elif group.kind == plan_pb2.GROUP_KIND_EXCHANGE:
                        for other in group.shards:
                            if other != shard:
                                receiver = cluster.shards[other]
                                arrive = cluster.arrived(receiver, group.id).add
                                cluster.carry(host, receiver, group.nbytes, arrive)
        release(step)


def _is_sent(group: plan_pb2.Group) -> bool:
    return group.kind == plan_pb2.GROUP_KIND_REDUCTION
