"""The own memory of a MemoryX shard and of a SwarmX node (see plan.proto), and the gradients that a shard keeps."""

from collections.abc import Iterable

from appliance.compiler.cost.kernel_profile import profile_kernels
from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.table.lookup import spec
from waferbox.links.elements import aligned, tensor_bytes
from waferbox.runtime.arena import is_in_arena
from waferbox.runtime.schedule import part_bytes
from wsc.v1 import plan_pb2

# --- Late gradients ---------------------------------------------------------------------------------------------------


def late_gradients(plan: plan_pb2.MemoryXPlan) -> set[int]:
    """The gradient groups that a shard reads after its next message, before which it would release them.

    Most updates follow their gradient at once. An update that waits for all gradients, as with a norm over them, would
    keep all their buffers occupied on the senders. The shard copies such gradients instead.
    """
    groups = {group.id: group for group in plan.groups}
    brought: dict[int, int] = {}  # by value: the group that brought it
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
    """Marks the Receive of each late gradient."""
    late = late_gradients(plan)
    for instruction in plan.instructions:
        if instruction.WhichOneof("kind") == "receive" and instruction.receive.group in late:
            instruction.receive.keep = True


# --- Own memory -------------------------------------------------------------------------------------------------------


def shard_bytes(plan: plan_pb2.MemoryXPlan) -> int:
    """Bytes of a shard: states, buffers of messages, gradients that are kept, and values that kernels make."""
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
    """Bytes of results that go neither to a state nor into a group. The results of loops have permanent buffers."""
    profiles = profile_kernels(plan.kernels)
    permanent = 0
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
            permanent += sum(own.values())
            continue
        most = max(most, sum(held.values()) + profile.working_bytes)
        held.update(own)
        for value in run.drops:
            held.pop(value, None)
    return permanent + most


def adding_node_bytes(plan: plan_pb2.SwarmXPlan, num_csx: int) -> int:
    """Bytes of the sums of a SwarmX node: gradients in the arena, others in buffers of their own."""
    if num_csx == 1:
        return 0
    return plan.arena.nbytes + sum(_joined_bytes(plan, num_csx))


def _joined_bytes(plan: plan_pb2.SwarmXPlan, num_csx: int) -> Iterable[int]:
    in_arena = {place.group for place in plan.arena.places}
    for group in plan.groups:
        if group.kind == plan_pb2.GROUP_KIND_REDUCTION and group.id not in in_arena:
            parts = num_csx if group.reduction == plan_pb2.REDUCTION_GATHER else 1
            yield aligned(part_bytes(group) * parts)
