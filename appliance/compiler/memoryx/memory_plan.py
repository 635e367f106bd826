"""What a shard of MemoryX, and a SwarmX node that adds, have in memory of their own. See OWN MEMORY in plan.proto."""

from collections.abc import Iterable

from appliance.compiler.cost.kernel_profile import profile_kernels
from cirh.dialect.operations import Const, body_ops
from cirh.table.lookup import spec
from interconnect.links.elements import aligned, tensor_bytes
from nodes.steps.schedule import part_bytes
from wsc.v1 import plan_pb2


def shard_bytes(plan: plan_pb2.MemoryXPlan) -> int:
    """States, weights that are computed for the wafers, gradients that are kept, and what kernels make."""
    groups = {group.id: group for group in plan.groups}
    states = {slot.value: aligned(tensor_bytes(slot.type)) for slot in plan.states}
    sent = {i.send.group for i in plan.instructions if i.HasField("send")}
    buffers = {
        (group, member.value): aligned(tensor_bytes(member.type))
        for group in sent
        for member in groups[group].members
        if member.value not in states or groups[group].kind != plan_pb2.GROUP_KIND_WEIGHTS
    }
    kept = sum(groups[i.receive.group].nbytes for i in plan.instructions if i.receive.keep)
    placed = {value for _, value in buffers}
    return sum(states.values()) + sum(buffers.values()) + kept + _kernel_bytes(plan, placed)


def _kernel_bytes(plan: plan_pb2.MemoryXPlan, placed: set[int]) -> int:
    """Results that go neither to a state nor into a group: those of loops have buffers for good."""
    profiles = profile_kernels(plan.kernels)
    for_good = 0
    held: dict[int, int] = {}
    most = 0
    for instruction in plan.instructions:
        if not instruction.HasField("run"):
            continue
        run = instruction.run
        profile = profiles[run.kernel]
        commits = list(run.commits) or [0] * len(run.outputs)
        made = zip(run.outputs, profile.output_bytes, commits, profile.output_sources, strict=True)
        own = {value: nbytes for value, nbytes, state, _ in made if not state and value not in placed}
        ops = [op for op in body_ops(profile.module) if not isinstance(op, Const)]
        if all(spec(op.name).pointwise or op.name == "cirh.BroadcastInDim" for op in ops):
            for_good += sum(own.values())
            continue
        most = max(most, sum(held.values()) + profile.working_bytes)
        held.update(own)
        for value in run.drops:
            held.pop(value, None)
    return for_good + most


def adding_node_bytes(plan: plan_pb2.SwarmXPlan, num_csx: int) -> int:
    """The sums: gradients in the arena, the others in places of their own."""
    if num_csx == 1:
        return 0
    return plan.arena.nbytes + sum(_joined_bytes(plan, num_csx))


def _joined_bytes(plan: plan_pb2.SwarmXPlan, num_csx: int) -> Iterable[int]:
    in_arena = {place.group for place in plan.arena.places}
    for group in plan.groups:
        if group.kind == plan_pb2.GROUP_KIND_REDUCTION and group.id not in in_arena:
            parts = num_csx if group.reduction == plan_pb2.REDUCTION_GATHER else 1
            yield aligned(part_bytes(group) * parts)
