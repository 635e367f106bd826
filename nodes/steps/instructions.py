"""What an instruction of a plan makes, and what it reads."""

from collections.abc import Mapping

from wsc.v1 import plan_pb2


def makes_and_reads(
    instruction: plan_pb2.Instruction, groups: Mapping[int, plan_pb2.Group]
) -> tuple[list[int], list[int]]:
    """The values that an instruction makes, and those that it reads."""
    match instruction.WhichOneof("kind"):
        case "receive":
            return [member.value for member in groups[instruction.receive.group].members], []
        case "run":
            return list(instruction.run.outputs), list(instruction.run.inputs)
        case "send":
            return [], [member.value for member in groups[instruction.send.group].members]
        case "commit":
            return [], [instruction.commit.value]
    return [], []
