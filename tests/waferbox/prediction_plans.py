"""Plans of one weight each, written by hand, of which every time can be computed on paper."""

import itertools

from wsc.v1 import plan_pb2

NBYTES = 1 << 20
WEIGHTS, GRADIENT = 1, 2


def plan_of(num_groups: int = 1, *, reduced: bool = True, in_arena: bool = False) -> plan_pb2.Plan:
    """A wafer receives some groups of weights, runs kernel 1 after each, and sends a gradient of the same size.

    The only shard sends them all, then takes each gradient and runs kernel 1. Groups have 1 MiB each.
    """
    plan = plan_pb2.Plan(num_csx=1, num_shards=1, batch_rows=10)
    shard = plan.memoryx.add()
    values = itertools.count(1)
    for number in range(num_groups):
        weights = plan_pb2.Group(
            id=WEIGHTS + 10 * number, kind=plan_pb2.GROUP_KIND_WEIGHTS, nbytes=NBYTES, source_shard=0
        )
        weights.members.add(value=next(values))
        gradient = plan_pb2.Group(
            id=GRADIENT + 10 * number,
            kind=plan_pb2.GROUP_KIND_REDUCTION,
            nbytes=NBYTES,
            shards=[0],
            reduction=plan_pb2.REDUCTION_SUM,
        )
        gradient.members.add(value=next(values))
        plan.wafer.groups.append(weights)
        plan.wafer.instructions.add().receive.group = weights.id
        run = plan.wafer.instructions.add().run
        run.kernel = 1
        shard.groups.append(weights)
        plan.swarmx.groups.append(weights)
        plan.swarmx.times.append(1)
        shard.instructions.add().send.group = weights.id
        if reduced:
            run.outputs.append(gradient.members[0].value)
            plan.wafer.groups.append(gradient)
            plan.wafer.instructions.add().send.group = gradient.id
            shard.groups.append(gradient)
            plan.swarmx.groups.append(gradient)
            plan.swarmx.times.append(1)
            if in_arena:  # All share one extent, so each waits until the one before has been read.
                for arena in (plan.wafer.arena, plan.swarmx.arena, shard.arena):
                    arena.places.add(group=gradient.id, offset=0, window=0)
                    arena.nbytes, arena.credited = NBYTES, True
    if reduced:
        for number in range(num_groups):
            shard.instructions.add().receive.group = GRADIENT + 10 * number
            shard.instructions.add().run.kernel = 1
    return plan
