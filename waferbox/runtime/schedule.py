"""The counting of steps, and the groups that travel in each, as all roles compute them from the plan and from Start.

Steps are counted from 1, in frames and acknowledgements; an acknowledgement of step 0 says that nothing was consumed.
After a death the execution resumes in another epoch, with new links, and frames count the steps of the epoch. Reports,
outputs and checkpoints have the step of the execution: StepSchedule translates.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from waferbox.limits import MAX_RUN_AHEAD_STEPS
from waferbox.links.elements import tensor_bytes
from wsc.v1 import node_pb2, plan_pb2

# The limits of one execution: a request far beyond any use is a mistake or an attack.
MAX_STEPS: Final = 1 << 40
MAX_CHECKPOINTS: Final = 1 << 20
MAX_GROUPS: Final = 1 << 20


def check_steps(num_steps: int, activation_steps: int, checkpoint_steps: Sequence[int], least: int = 1) -> None:
    """Raises ValueError: an execution exceeds the limits. activation_steps: 0 stands for 1. least: number of steps."""
    if not least <= num_steps <= MAX_STEPS:
        raise ValueError(f"an execution has at least {least} and at most {MAX_STEPS} steps, not {num_steps}")
    if not 0 <= activation_steps <= MAX_STEPS:
        raise ValueError(f"activation_steps is at most {MAX_STEPS}, not {activation_steps}")
    if len(checkpoint_steps) > MAX_CHECKPOINTS:
        raise ValueError(f"an execution has at most {MAX_CHECKPOINTS} checkpoint steps, not {len(checkpoint_steps)}")


def check_groups(groups: Sequence[plan_pb2.Group]) -> None:
    """Raises ValueError: no plan has so many groups, or such a number of a group."""
    if len(groups) > MAX_GROUPS:
        raise ValueError(f"a plan has at most {MAX_GROUPS} groups, not {len(groups)}")
    for group in groups:
        if group.id >= CREDIT_GROUPS:
            raise ValueError(f"the number of a group is below {CREDIT_GROUPS}, not {group.id}")


def worker_of_step(step: int, num_workers: int) -> int:
    """Returns the number of the worker, among those of a wafer, that supplies the batch of a step."""
    return (step - 1) % num_workers


def steps_of_worker(worker: int, num_workers: int, num_steps: int) -> range:
    """Returns the steps whose batches a worker supplies."""
    return range(1 + worker, num_steps + 1, num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """The steps of an epoch, and those of them in which outputs leave and snapshots are taken.

    Methods take and return steps of the epoch unless they say otherwise.
    """

    num_steps: int  # of the epoch
    activation_steps: int
    checkpoint_steps: frozenset[int]  # of the execution, after done_steps
    run_ahead_steps: int
    done_steps: int = 0  # of the execution, in earlier epochs

    @classmethod
    def from_start(cls, start: node_pb2.Start) -> "StepSchedule":
        """Returns the schedule of a Start. Raises ValueError: it exceeds the limits."""
        check_steps(start.num_steps, start.activation_steps, start.checkpoint_steps, least=0)
        if start.run_ahead_steps > MAX_RUN_AHEAD_STEPS:
            raise ValueError(f"run_ahead_steps is at most {MAX_RUN_AHEAD_STEPS}, not {start.run_ahead_steps}")
        if start.done_steps > start.num_steps:
            raise ValueError(f"{start.done_steps} of {start.num_steps} steps cannot have been done")
        return cls(
            num_steps=start.num_steps - start.done_steps,
            activation_steps=max(1, start.activation_steps),
            checkpoint_steps=frozenset(s for s in start.checkpoint_steps if start.done_steps < s <= start.num_steps),
            run_ahead_steps=max(1, start.run_ahead_steps),
            done_steps=start.done_steps,
        )

    def global_step(self, step: int) -> int:
        """Returns a step of the epoch as a step of the execution."""
        return step + self.done_steps

    def outputs_leave(self, step: int) -> bool:
        """Whether groups that go to the coordinator travel in this step."""
        return (step + self.done_steps) % self.activation_steps == 0 or step == self.num_steps

    def keeps_snapshot(self, step: int) -> bool:
        return step + self.done_steps in self.checkpoint_steps

    def output_steps(self) -> Iterator[int]:
        """Yields the steps in which outputs leave, in order."""
        first = self.activation_steps - self.done_steps % self.activation_steps
        yield from range(first, self.num_steps + 1, self.activation_steps)
        if self.num_steps and (self.num_steps + self.done_steps) % self.activation_steps:
            yield self.num_steps

    def steps_for_client(self, *, has_outputs: bool) -> Iterator[int]:
        """Yields the steps of which the client gets outputs or a checkpoint, in order."""
        checkpoints: Iterable[int] = sorted(step - self.done_steps for step in self.checkpoint_steps)
        last = 0
        for step in heapq.merge(self.output_steps() if has_outputs else (), checkpoints):
            if step != last:
                yield step
            last = step

    def last_output_step(self, step: int) -> int:
        """Returns the last step up to this one in which outputs leave; 0: none."""
        return step if step == self.num_steps else step - step % self.activation_steps

    @property
    def num_output_steps(self) -> int:
        """The number of steps in which outputs leave."""
        last = self.num_steps + self.done_steps
        in_all = -(-last // self.activation_steps) if self.num_steps else last // self.activation_steps
        return in_all - self.done_steps // self.activation_steps


def is_for_coordinator_only(group: plan_pb2.Group) -> bool:
    """Whether the coordinator alone receives the group, which then travels only when outputs leave, and as bytes.

    A reference to a buffer with one slot would not be safe, as the sender may run ahead of the client.
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
    """Whether wafers receive the group, from MemoryX or SwarmX."""
    return group.kind == plan_pb2.GROUP_KIND_WEIGHTS or (
        group.kind == plan_pb2.GROUP_KIND_REDUCTION and group.to_wafers
    )


def part_bytes(group: plan_pb2.Group) -> int:
    """Returns the bytes of a wafer's frame of a group. Parts of a GATHER have no padding, as they are joined."""
    if group.reduction == plan_pb2.REDUCTION_GATHER:
        return sum(tensor_bytes(member.type) for member in group.members)
    return group.nbytes


# The slots of a worker's ring: the most batches that its wafer has not taken.
BATCH_SLOTS = 4

# With fewer operations in a step, other threads of a wafer gain less than waking them costs: kernels take microseconds.
THREADED_FLOPS = 2_000_000_000

# The most weights groups of one shard that are sent and not yet taken by a wafer: the depth of the prefetch.
WEIGHTS_WINDOW = 8
# A wafer grants credit for several groups at once: a frame for each would cost more than it carries.
WEIGHTS_CREDIT_BATCH = WEIGHTS_WINDOW // 2
# So many groups may be sent beyond those that the wafers have taken, even if credit for part of a batch is due.
WEIGHTS_AHEAD = WEIGHTS_WINDOW - WEIGHTS_CREDIT_BATCH + 1

# A wafer sends up an empty frame of group CREDIT_GROUPS + k, whose step is the number of shard k's weights groups that
# it has taken. SwarmX forwards the least number of its children, and grants shard k the difference.
CREDIT_GROUPS = 1 << 31


def makes_and_reads(
    instruction: plan_pb2.Instruction, groups: Mapping[int, plan_pb2.Group]
) -> tuple[list[int], list[int]]:
    """Returns the values that an instruction makes, and the values that it reads."""
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
