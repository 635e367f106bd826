"""What a shard of MemoryX, and a SwarmX node that adds, have in memory, and which gradients a shard keeps. See OWN
MEMORY in plan.proto.
"""

from collections.abc import Iterable

from appliance.compiler.cost.kernel_profile import profile_kernels
from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.table.lookup import spec
from waferbox.links.elements import aligned, tensor_bytes
from waferbox.runtime.arena import is_in_arena
from waferbox.runtime.schedule import part_bytes
from wsc.v1 import plan_pb2

# ----------------------------------------------------------------------------------------------------------------------
# Which gradients a shard keeps: those that it reads behind its next message, before which it releases them


def late_gradients(plan: plan_pb2.MemoryXPlan) -> set[int]:
    """The groups of which a member is read behind the message that follows the group.

    An update mostly follows its gradient at once. One that waits for all gradients, as with a norm over them, would
    have the senders keep them all: the shard does.
    """
    groups = {group.id: group for group in plan.groups}
    brought: dict[int, int] = {}  # value -> group
    released: set[int] = set()
    borrowed: set[int] = set()
    late: set[int] = set()
    for instruction in plan.instructions:
        kind = instruction.WhichOneof("kind")
        read: list[int] = []
        match kind:
            case "run":
                read = list(instruction.run.inputs)
            case "commit":
                read = [instruction.commit.value]
            case "send":
                read = [member.value for member in groups[instruction.send.group].members]
        if kind in ("receive", "send"):
            released |= borrowed
            borrowed = set()
        late.update(brought[value] for value in released.intersection(read))
        if kind == "receive" and is_in_arena(group := groups[instruction.receive.group]):
            borrowed = {member.value for member in group.members}
            brought.update(dict.fromkeys(borrowed, group.id))
    return late


def keep_late_gradients(plan: plan_pb2.MemoryXPlan) -> None:
    """Says so in the Receive of each of them."""
    late = late_gradients(plan)
    for instruction in plan.instructions:
        if instruction.WhichOneof("kind") == "receive" and instruction.receive.group in late:
            instruction.receive.keep = True


# ----------------------------------------------------------------------------------------------------------------------
# What a shard of MemoryX, and a SwarmX node that adds, have in memory of their own. See OWN MEMORY in plan.proto


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
