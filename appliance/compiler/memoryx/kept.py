"""Which gradients a shard keeps: those that it reads behind its next message, before which it releases them."""

from nodes.steps.arena import is_in_arena
from wsc.v1 import plan_pb2


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
