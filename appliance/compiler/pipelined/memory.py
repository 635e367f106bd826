"""The memory of a wafer in layer pipelined mode, and whether it suffices.

All states, the batch, and joined values are held throughout the step. Other values are counted for the region that
makes them: from the instruction that makes a value to the first instruction of that region before which, at any speed
of the other regions, all reads have certainly been run. The sum of the regions' maxima is an upper bound, as the
regions need not reach their maxima at the same time.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Final

from appliance.compiler.core.errors import WaferMemoryError
from appliance.compiler.cost.kernel_profile import KernelProfile
from appliance.compiler.pipelined.order import At, find_order, instructions
from appliance.compiler.wafer_schedule.memory_plan import GAPS
from appliance.drawing.number_text import bytes_text
from waferbox.links.elements import tensor_bytes
from waferbox.runtime.schedule import makes_and_reads
from wsc.v1 import plan_pb2

STREAMING: Final = (
    "the execution strategy weight_streaming (WAFERBOX_EXECUTION_STRATEGY), in which weights lie in MemoryX"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionMemory:
    """The most memory that a region holds.

    Attributes:
        name: name of the region.
        state_bytes: weights and optimizer state.
        joined_bytes: gradients that are accumulated, and other values that micro-batches make in parts.
        activation_bytes: values of all its micro-batches in flight.
        working_bytes: temporary values of the kernel that runs.
    """

    name: str
    state_bytes: int
    joined_bytes: int
    activation_bytes: int
    working_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.joined_bytes + self.activation_bytes + self.working_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMemory:
    """The memory of a wafer in layer pipelined mode, region by region."""

    capacity_bytes: int
    batch_bytes: int
    regions: tuple[RegionMemory, ...]

    @property
    def needed_bytes(self) -> int:
        """The most memory that the step needs at once."""
        return self.batch_bytes + sum(region.total_bytes for region in self.regions)

    @property
    def own_bytes(self) -> int:
        """The most memory of the process, with gaps, without the batch, which lies in the workers' memory."""
        moving = sum(region.activation_bytes + region.working_bytes for region in self.regions)
        return self.needed_bytes - self.batch_bytes + round(moving * GAPS)


def plan_memory(plan: plan_pb2.PipelinePlan, profiles: Mapping[int, KernelProfile]) -> PipelineMemory:
    """Computes the memory of each region from its instructions. profiles: by kernel."""
    states = {slot.value: tensor_bytes(slot.type) for slot in plan.states}
    joined = {value.value: tensor_bytes(value.type) for value in plan.joined}
    homes = _homes(plan, {*states, *joined})
    held: list[list[int]] = [[0] * (len(region.instructions) + 1) for region in plan.regions]  # changes, by index
    working = [[0] * len(region.instructions) for region in plan.regions]
    ends = _ends(plan)
    for (region, place), instruction in instructions(plan):
        if not instruction.HasField("run"):
            continue
        run = instruction.run
        profile = profiles[run.kernel]
        committed = dict(zip(run.outputs, run.commits, strict=False))
        # A result that is written to a state, or is a joined value itself, is counted there already.
        placed = [
            nbytes
            for value, nbytes in zip(run.outputs, profile.output_bytes, strict=True)
            if committed.get(value) or (value in joined and plan.micro_batches == 1)
        ]
        working[region][place] = max(profile.working_bytes - sum(placed), 0)
        for value, nbytes in zip(run.outputs, profile.output_bytes, strict=True):
            if value not in joined and not committed.get(value):
                held[region][place + 1] += nbytes
                held[region][ends[value]] -= nbytes
    regions = []
    for number, region_plan in enumerate(plan.regions):
        most = activations = now = 0
        for place, extra in enumerate(working[number]):
            now += held[number][place]
            if now + extra > most:
                most, activations = now + extra, now
        regions.append(
            RegionMemory(
                name=region_plan.name,
                state_bytes=sum(nbytes for value, nbytes in states.items() if homes.get(value, 0) == number),
                joined_bytes=sum(nbytes for value, nbytes in joined.items() if homes.get(value, 0) == number),
                activation_bytes=activations,
                working_bytes=most - activations,
            )
        )
    batch_bytes = sum(group.nbytes for group in plan.groups if group.kind == plan_pb2.GROUP_KIND_BATCH)
    return PipelineMemory(capacity_bytes=plan.memory_bytes, batch_bytes=batch_bytes, regions=tuple(regions))


def _homes(plan: plan_pb2.PipelinePlan, values: set[int]) -> dict[int, int]:
    """The region that replaces or makes a value, else the first that reads it."""
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    for (region, _), instruction in instructions(plan):
        run = instruction.run
        for value in (*run.commits, *run.outputs, instruction.commit.state):
            written.setdefault(value, region)
        for value in run.inputs:
            read.setdefault(value, region)
    return {value: written.get(value, read.get(value, 0)) for value in values}


def _ends(plan: plan_pb2.PipelinePlan) -> dict[int, int]:
    """By value: the index in its region's list from which on all reads of the value have certainly been run."""
    groups = {group.id: group for group in plan.groups}
    order = find_order(plan)
    made: dict[int, At] = {}
    readers: dict[int, list[At]] = defaultdict(list)
    kept: set[int] = set()  # values that are sent or copied to a state: they are held until the end of the step
    for at, instruction in instructions(plan):
        makes, reads = makes_and_reads(instruction, groups)
        made.update(dict.fromkeys(makes, at))
        kept.update(reads if instruction.HasField("send") or instruction.HasField("commit") else ())
        for value in reads:
            readers[value].append(at)
    ends = {}
    for value, (region, place) in made.items():
        last = len(order.done[region])
        end = last if value in kept else place + 1
        for reader in readers[value]:
            if reader[0] == region:
                end = max(end, reader[1] + 1)
            else:
                while end < last and order.done[region][end][reader[0]] <= reader[1]:
                    end += 1
        ends[value] = min(end, last)
    return ends


def check_memory(memory: PipelineMemory, global_rows: int, micro_batches: int) -> None:
    """Checks that the wafer has enough memory.

    Raises:
        WaferMemoryError: it has not; the message says how much is missing, where, and what to change.
    """
    over = memory.needed_bytes - memory.capacity_bytes
    if over <= 0:
        return
    states = sum(region.state_bytes for region in memory.regions)
    joined = sum(region.joined_bytes for region in memory.regions)
    moving = sum(region.activation_bytes + region.working_bytes for region in memory.regions)
    room = memory.capacity_bytes - states - joined
    share = max(room, 0) / max(memory.batch_bytes + moving, 1)
    largest = max(memory.regions, key=lambda region: region.total_bytes)
    needed = ceil(memory.needed_bytes / (1 << 30))
    ways = []
    if room > 0 and global_rows > micro_batches:
        ways.append("use smaller micro-batches (cstorch.backends.csx.performance.micro_batch_size)")
    if room > 0:
        ways.append(f"a batch of at most about {max(int(global_rows * share), 1)} rows instead of {global_rows}")
    ways.append(STREAMING)
    ways.append(f"let the wafer take more of its host's memory: cstorch.backends.csx.debug.wafer_memory_gi = {needed}")
    raise WaferMemoryError(
        f"in layer pipelined mode the step needs {bytes_text(memory.needed_bytes)} of the wafer's memory, "
        f"{bytes_text(over)} more than it has ({bytes_text(memory.capacity_bytes)}): weights and optimizer state "
        f"{bytes_text(states)}, gradients {bytes_text(joined)}, batch {bytes_text(memory.batch_bytes)}, activations of "
        f"the micro-batches in flight {bytes_text(moving)}, most of it in region {largest.name}; {', or '.join(ways)}",
        fitting_share=min(share, 1.0),
    )
