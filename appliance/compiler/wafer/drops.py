"""When a role may forget a value: noted with the Run behind which nothing reads it."""

from collections.abc import Collection, Mapping, Sequence

from wsc.v1 import plan_pb2


def add_drops(
    instructions: Sequence[plan_pb2.Instruction],
    kept: Collection[int],
    loads: Mapping[int, Collection[int]] | None = None,
) -> None:
    """Adds to each Run the values that it is the last to read.

    kept: values that are never dropped; loads: values by the group that brings them anew.
    """
    loads = loads or {}
    live = set(kept)
    for instruction in reversed(instructions):
        match instruction.WhichOneof("kind"):
            case "receive":
                live.difference_update(loads.get(instruction.receive.group, ()))
            case "run":
                read = list(dict.fromkeys(instruction.run.inputs))
                instruction.run.drops.extend(value for value in read if value not in live)
                live.update(read)
