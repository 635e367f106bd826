"""The memory that a wafer needs while it runs its program, and whether it has enough."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from appliance.compiler.core.errors import WaferMemoryError
from appliance.compiler.cost.kernel_profile import KernelProfile
from appliance.drawing.number_text import bytes_text
from waferbox.cirh.execution.kernel import Kernel
from waferbox.links.elements import aligned, tensor_bytes
from waferbox.runtime.arena import direct_values
from waferbox.runtime.loops import body_of
from waferbox.runtime.schedule import WEIGHTS_WINDOW, makes_and_reads
from wsc.v1 import plan_pb2

Groups = Mapping[int, plan_pb2.Group]

# Unused memory between blocks of different sizes, as a share of the memory in use: 2 to 15 % in measured models.
GAPS: Final = 0.075


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The memory of a wafer while one segment runs. All but `arriving_bytes` must fit the wafer.

    Attributes:
        segment: name of the segment.
        batch_bytes: the wafer's part of the batch.
        weight_bytes: weights that have been received and will be read.
        activation_bytes: values of earlier segments that will be read.
        gradient_bytes: buffers of all groups that are sent: the gradients' arena, and a buffer for each other group.
        working_bytes: the most that the segment itself makes.
        arriving_bytes: weights that MemoryX may have sent ahead; on one host they lie in its memory.
    """

    segment: str
    batch_bytes: int
    weight_bytes: int
    activation_bytes: int
    gradient_bytes: int
    working_bytes: int
    arriving_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.scaling_bytes

    @property
    def own_bytes(self) -> int:
        """Memory of the wafer's process: with gaps, without batch and weights, which lie in other roles' memory."""
        return self.gradient_bytes + round((self.activation_bytes + self.working_bytes) * (1 + GAPS))

    @property
    def scaling_bytes(self) -> int:
        """The part that grows with the rows of the batch."""
        return self.batch_bytes + self.activation_bytes + self.working_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """A wafer's memory, segment by segment."""

    capacity_bytes: int
    points: tuple[MemoryPoint, ...]

    @property
    def peak(self) -> MemoryPoint:
        """The segment that needs the most memory."""
        return max(self.points, key=lambda point: point.total_bytes)

    @property
    def needed_bytes(self) -> int:
        """The most memory that the step needs at once."""
        return self.peak.total_bytes

    @property
    def fits(self) -> bool:
        """Whether the wafer has enough memory."""
        return self.needed_bytes <= self.capacity_bytes

    @property
    def own_bytes(self) -> int:
        """The most memory of the wafer's process at once."""
        return max(point.own_bytes for point in self.points)


def plan_memory(plan: plan_pb2.WaferPlan, profiles: Mapping[int, KernelProfile], capacity_bytes: int) -> MemoryPlan:
    """Computes the memory of a wafer at each Run of its program.

    Args:
        plan: the wafer's plan.
        profiles: by kernel, the sizes of its results and temporary values.
        capacity_bytes: memory of a wafer.
    """
    groups: Groups = {group.id: group for group in plan.groups}
    gradient_bytes = plan.arena.nbytes + sum(map(aligned, _other_buffers(plan, groups)))
    in_buffers = _written_in_buffers(plan, groups)
    batch_bytes = sum(group.nbytes for group in plan.groups if group.kind == plan_pb2.GROUP_KIND_BATCH)
    dying = _last_uses(plan, groups)
    arriving = _arriving(plan, groups)
    weights, made = _Held(), _Held()
    outputs = {value for instruction in plan.instructions for value in instruction.run.outputs}
    joined: set[int] = set()  # values whose first part is in its buffer: further parts take memory until they are added
    points = []
    for position, instruction in enumerate(plan.instructions):
        match instruction.WhichOneof("kind"):
            case "receive":
                group = groups[instruction.receive.group]
                if group.kind != plan_pb2.GROUP_KIND_BATCH:
                    place = weights if group.kind == plan_pb2.GROUP_KIND_WEIGHTS else made
                    for member in group.members:
                        place.add(member.value, tensor_bytes(member.type))
            case "run":
                run = instruction.run
                profile = profiles[run.kernel]
                new = dict(zip(run.outputs, profile.output_bytes, strict=True))
                placed = sum(
                    profile.output_bytes[i]
                    for i in _direct_results(profile) - profile.beside
                    if run.outputs[i] in in_buffers and run.outputs[i] not in joined
                )
                joined.update(value for value in run.outputs if value in in_buffers)
                freed = frozenset(
                    index
                    for index, value in enumerate(run.inputs)
                    if value in run.drops and value in outputs and value not in in_buffers
                )
                points.append(
                    MemoryPoint(
                        segment=run.layer,
                        batch_bytes=batch_bytes,
                        weight_bytes=weights.nbytes,
                        activation_bytes=made.nbytes,
                        gradient_bytes=gradient_bytes,
                        working_bytes=max(profile.working_bytes_without(freed, frozenset(run.overwritten)) - placed, 0),
                        arriving_bytes=arriving[position],
                    )
                )
                for value, nbytes in new.items():
                    if value not in in_buffers:
                        made.add(value, nbytes)
        for value in dying[position]:
            weights.drop(value)
            made.drop(value)
    return MemoryPlan(capacity_bytes=capacity_bytes, points=tuple(points) or (_idle(batch_bytes),))


# The memory of many orders with the same kernels is planned; to prepare one in slices takes seconds.
@lru_cache(maxsize=256)
def _direct_results(profile: KernelProfile) -> frozenset[int]:
    """The results that a kernel can write straight to a send buffer."""
    return Kernel(profile.module).direct_results


class _Held:
    """The values that are held at one moment, and their bytes."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sizes: dict[int, int] = {}

    def add(self, value: int, nbytes: int) -> None:
        self.nbytes += nbytes - self._sizes.get(value, 0)
        self._sizes[value] = nbytes

    def drop(self, value: int) -> None:
        self.nbytes -= self._sizes.pop(value, 0)


def _other_buffers(plan: plan_pb2.WaferPlan, groups: Groups) -> Iterator[int]:
    """Sizes of the groups that are sent from buffers outside of the arena."""
    in_arena = {place.group for place in plan.arena.places}
    for instruction in plan.instructions:
        if instruction.HasField("send") and instruction.send.group not in in_arena:
            yield groups[instruction.send.group].nbytes


def _written_in_buffers(plan: plan_pb2.WaferPlan, groups: Groups) -> set[int]:
    """Values that are held only in the buffers from which they are sent."""
    in_arena = {place.group for place in plan.arena.places}
    direct = direct_values(plan) if plan.arena.credited else None
    found: set[int] = set()
    for instruction in plan.instructions:
        if instruction.HasField("send"):
            for member in groups[instruction.send.group].members:
                if direct is None or instruction.send.group not in in_arena or member.value in direct:
                    found.add(member.value)
    return found


def _idle(batch_bytes: int) -> MemoryPoint:
    """The memory in a step in which the wafers run no segment."""
    return MemoryPoint(
        segment="idle",
        batch_bytes=batch_bytes,
        weight_bytes=0,
        activation_bytes=0,
        gradient_bytes=0,
        working_bytes=0,
        arriving_bytes=0,
    )


def check_memory(
    plan: MemoryPlan,
    num_csx: int,
    global_rows: int,
    micro_batches: int,
    whole_batch_first: bool = False,
    in_slices: bool = False,
) -> int:
    """Checks that the wafers have enough memory.

    Args:
        plan: the memory of a wafer.
        num_csx: number of wafers.
        global_rows: rows of the batch, over all wafers.
        micro_batches: number of micro-batches.
        whole_batch_first: whether most segments are run with all micro-batches, for values of the whole batch.
        in_slices: whether a row is computed in slices.

    Returns:
        The most memory that a wafer needs, in bytes.

    Raises:
        WaferMemoryError: it has less; the message says how much is missing, where, and what to change.
    """
    peak = plan.peak
    over = peak.total_bytes - plan.capacity_bytes
    if over > 0:
        parts = (
            f"weights {bytes_text(peak.weight_bytes)}, gradients {bytes_text(peak.gradient_bytes)}, "
            f"batch {bytes_text(peak.batch_bytes)}, "
            f"activations {bytes_text(peak.activation_bytes + peak.working_bytes)}"
        )
        raise WaferMemoryError(
            f"the step needs {bytes_text(peak.total_bytes)} of a wafer's memory, {bytes_text(over)} more than it has "
            f"({bytes_text(plan.capacity_bytes)}), in segment {peak.segment}: {parts}; "
            f"{_way_out(plan, num_csx, global_rows, micro_batches, whole_batch_first, in_slices)}",
            fitting_share=min(_fitting_share(point, plan.capacity_bytes) for point in plan.points),
        )
    return peak.total_bytes


def _way_out(
    plan: MemoryPlan, num_csx: int, global_rows: int, micro_batches: int, whole_batch_first: bool, in_slices: bool
) -> str:
    tightest = min(plan.points, key=lambda point: _fitting_share(point, plan.capacity_bytes))
    share = _fitting_share(tightest, plan.capacity_bytes)
    rows_at_once = global_rows // (num_csx * micro_batches)
    rows = int(rows_at_once * share)
    needed = math.ceil(plan.peak.total_bytes / (1 << 30))
    larger = f"let wafers take more of their hosts' memory: cstorch.backends.csx.debug.wafer_memory_gi = {needed}"
    if whole_batch_first:
        return (
            "micro-batches do not help, as the statistics of the whole batch (batch norm, scores of all samples) are "
            f"made layer by layer of all its rows: use a smaller batch, more wafers (num_csx), or {larger}"
        )
    if rows < 1 < rows_at_once:
        return (
            f"with {rows_at_once} rows at once there is no room beside the weights and gradients of segment "
            f"{tightest.segment}: let micro-batches of fewer rows be tried "
            f'(cstorch.backends.csx.performance.micro_batch_size = "auto"), or {larger}'
        )
    if rows < 1 and share > 0:
        left = plan.capacity_bytes - tightest.weight_bytes - tightest.gradient_bytes
        return (
            f"a single row of the batch needs {bytes_text(tightest.scaling_bytes)}"
            f"{', even in slices,' if in_slices else ''} in segment "
            f"{tightest.segment}, where weights and gradients leave {bytes_text(left)}, so neither a smaller batch nor "
            f"more wafers (num_csx) help: make rows shorter or the layer smaller, or {larger}"
        )
    if rows < 1:
        return (
            f"weights and gradients of segment {tightest.segment} leave no room for a single row of the batch, so "
            f"neither a smaller batch nor more wafers (num_csx) helps: make the layer smaller, or {larger}"
        )
    wafers = next(count for count in range(num_csx + 1, global_rows + 1) if _fits(global_rows, count, rows))
    if micro_batches > 1:
        return (
            f"use micro-batches of at most about {rows} rows (cstorch.backends.csx.performance.micro_batch_size), or "
            f"{larger}"
        )
    return (
        f"use micro-batches of at most about {rows} rows (micro_batch_size), a batch of at most about "
        f"{rows * num_csx} rows instead of {global_rows} ({share:.0%} of it), the same batch on {wafers} wafers "
        f"(num_csx={wafers}), or {larger}"
    )


def _fits(global_rows: int, num_csx: int, rows: int) -> bool:
    return global_rows % num_csx == 0 and global_rows // num_csx <= rows


def _fitting_share(point: MemoryPoint, capacity_bytes: int) -> float:
    """The share of the batch that fits into the memory beside weights and gradients."""
    room = capacity_bytes - point.weight_bytes - point.gradient_bytes
    return room / point.scaling_bytes if point.scaling_bytes else (1.0 if room >= 0 else 0.0)


def _last_uses(plan: plan_pb2.WaferPlan, groups: Groups) -> dict[int, list[int]]:
    """By instruction, the values that are not used after it, or not before they are received again."""
    dying: dict[int, list[int]] = defaultdict(list)
    live: set[int] = set()
    sums = {joined.value for joined in plan.joined}
    body, looped = body_of(plan.loop), set(plan.looped_parts)
    # What further repetitions read is there in the first.
    steps = [plan.micro_batches_at_once * repetition for repetition in range(1, plan.loop.times)]
    for position in range(len(plan.instructions) - 1, -1, -1):
        instruction = plan.instructions[position]
        brought, used = makes_and_reads(instruction, groups)
        if instruction.run.micro_batch:  # adds to the sums of the first micro-batch, which is a use of them
            used += sums.intersection(brought)
            brought = [value for value in brought if value not in sums]
        if position in body:
            used += [value + step for value in looped.intersection(used) for step in steps]
        # A value that nothing uses is dropped where it is made.
        for value in dict.fromkeys((*used, *brought)):
            if value not in live:
                dying[position].append(value)
        live.difference_update(brought)
        live.update(used)
    return dying


def _arriving(plan: plan_pb2.WaferPlan, groups: Groups) -> dict[int, int]:
    """By instruction: bytes of the weights groups that may have been sent but have not been received."""
    received = [
        (position, groups[instruction.receive.group])
        for position, instruction in enumerate(plan.instructions)
        if instruction.WhichOneof("kind") == "receive"
    ]
    streams: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for position, group in received:
        if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
            streams[group.source_shard].append((position, group.nbytes))
    bytes_at = dict.fromkeys(range(len(plan.instructions)), 0)
    for stream in streams.values():
        following = 0  # the place in the stream of the first group that has not been received
        for position in bytes_at:
            while following < len(stream) and stream[following][0] <= position:
                following += 1
            bytes_at[position] += sum(nbytes for _, nbytes in stream[following : following + WEIGHTS_WINDOW])
    return bytes_at
