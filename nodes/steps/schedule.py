"""What every role computes alike from the plan and from Start: how steps are counted, which groups travel in which.

Steps are counted from 1, in frames, acknowledgements and messages alike: step t is the t-th of its execution, and an
acknowledgement of step 0 says that nothing has been consumed yet.
"""

from dataclasses import dataclass

from interconnect.links.elements import tensor_bytes
from wsc.v1 import node_pb2, plan_pb2


def worker_of_step(step: int, num_workers: int) -> int:
    """The number of the worker, among those of a wafer, that supplies the batch of a step."""
    return (step - 1) % num_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """How long an execution is, and in which of its steps outputs leave and snapshots are kept."""

    num_steps: int
    activation_steps: int
    checkpoint_steps: frozenset[int]
    run_ahead_steps: int

    @classmethod
    def from_start(cls, start: node_pb2.Start) -> "StepSchedule":
        return cls(
            num_steps=start.num_steps,
            activation_steps=max(1, start.activation_steps),
            checkpoint_steps=frozenset(start.checkpoint_steps),
            run_ahead_steps=max(1, start.run_ahead_steps),
        )

    def outputs_leave(self, step: int) -> bool:
        """Whether groups that go to the coordinator travel in this step."""
        return step % self.activation_steps == 0 or step == self.num_steps

    def keeps_snapshot(self, step: int) -> bool:
        return step in self.checkpoint_steps

    @property
    def num_output_steps(self) -> int:
        """In how many steps of the execution outputs leave."""
        return -(-self.num_steps // self.activation_steps)


def is_for_coordinator_only(group: plan_pb2.Group) -> bool:
    """Whether nobody but the coordinator gets the group: it travels only when outputs leave, and always as bytes.

    As bytes, because its sender may run ahead of the client: a reference to a buffer with one slot would not be safe.
    """
    if group.kind == plan_pb2.GROUP_KIND_OUTPUT:
        return True
    return (
        group.kind == plan_pb2.GROUP_KIND_REDUCTION
        and group.to_coordinator
        and not group.to_wafers
        and not group.shards
    )


def is_received_by_wafers(group: plan_pb2.Group) -> bool:
    """Whether the group comes down to the wafers from MemoryX or SwarmX."""
    return group.kind == plan_pb2.GROUP_KIND_WEIGHTS or (
        group.kind == plan_pb2.GROUP_KIND_REDUCTION and group.to_wafers
    )


def part_bytes(group: plan_pb2.Group) -> int:
    """The bytes of a wafer's frame of a reduction group. A part of a GATHER has no padding: parts lie end to end."""
    return tensor_bytes(group.members[0].type) if group.reduction == plan_pb2.REDUCTION_GATHER else group.nbytes


# Weights groups of one shard that may be on their way to a wafer, sent and not yet taken: the depth of the prefetch.
WEIGHTS_WINDOW = 8
# A wafer says what it has taken in lots: a frame for each would cost more than it carries.
WEIGHTS_CREDIT_LOT = WEIGHTS_WINDOW // 2
# As many may always be sent beyond those that the wafers have taken, whatever part of a lot they have not told yet.
WEIGHTS_AHEAD = WEIGHTS_WINDOW - WEIGHTS_CREDIT_LOT + 1

# An empty frame of group CREDIT_GROUPS + k goes up from a wafer: of shard k's weights groups it has taken as many as
# the frame's step says. SwarmX passes on the least of what its children say, and grants shard k the difference.
CREDIT_GROUPS = 1 << 31
