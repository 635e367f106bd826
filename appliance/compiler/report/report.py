"""The data of a compile report: the size, work and predicted time of each layer, memory, and the schedule of a step.

All of it is read from the plan, so that a report can be made again from an artifact. Times are predicted from the rates
of `MachineModel`: good for comparing layers, not for promising a rate.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Final

from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.pipelined.memory import PipelineMemory
from appliance.compiler.report.gathers import Gathering
from appliance.compiler.report.timeline import Timeline
from appliance.compiler.wafer_schedule.memory_plan import MemoryPlan
from appliance.drawing.floor_plan import FloorPlan
from appliance.drawing.number_text import bytes_text
from wsc.v1 import plan_pb2

# --- Notes on micro-batches -------------------------------------------------------------------------------------------


def micro_batch_notes(plan: plan_pb2.Plan) -> list[str]:
    """Lines for the user on how rows are divided in time; none if a wafer computes all rows at once, by default."""
    count, at_once = plan.worker.micro_batches, plan.wafer.micro_batches_at_once
    rows = plan.worker.local_rows // count
    notes = [
        f"micro_batch_size={each.size}: {each.refusal or f'{each.rows_per_second:,.0f} rows/s predicted'}"
        + ("" if each.refusal else f", {bytes_text(each.wafer_bytes)} of a wafer's memory")
        for each in (() if _is_replaced(plan) else plan.explored)
    ]
    if plan.HasField("pipeline"):
        names = ", ".join(region.name for region in plan.pipeline.regions)
        notes.append(
            f"Layer pipelined mode: all weights are on the wafer, in {len(plan.pipeline.regions)} region(s): {names}; "
            f"{plan.batch_rows} rows in {count} micro-batch(es) of {rows}"
            + (f", over {replicas} replicas" if (replicas := plan.pipeline.num_replicas) > 1 else "")
            + ("; weights are updated for each of them" if plan.pipeline.asynchronous_updates else "")
        )
    elif count > 1:
        if at_once == count:
            how = "layer by layer: each layer's weights are streamed once for all of them"
        else:
            how = (
                f"{at_once} at a time, as the activations of more do not fit its memory: weights are streamed "
                f"{count // at_once} times"
            )
            if any(i.receive.adds_to for part in plan.memoryx for i in part.instructions):
                how += ", and MemoryX adds the gradients of each time"
        notes.append(f"Each wafer computes its {plan.worker.local_rows} rows in {count} micro-batches of {rows}, {how}")
    if plan.wafer.recomputes:
        notes.append(
            "The backward pass computes each layer's activations again, from what the layer reads: those of the whole "
            "forward pass do not fit a wafer's memory"
        )
    if plan.wafer.kept_every:
        first, *further = plan.wafer.kept_every
        notes.append(
            f"Of {first} layers in a row, one keeps its outputs between the passes; the forward passes of the others "
            "are run again before their backward passes"
            + (
                f", and while they are, one of {' and of '.join(map(str, further))} keeps its outputs"
                if further
                else ""
            )
        )
    if plan.wafer.HasField("kept_at_most"):
        kept = plan.wafer.kept_at_most
        keep = "At most 1 layer keeps its outputs" if kept == 1 else f"At most {kept} layers keep their outputs"
        notes.append(
            f"{keep} at once; the forward passes of the others are run again before their backward passes, each as few "
            "times as that allows"
            if kept
            else "No layer keeps its outputs: before each layer's backward pass, the forward passes of all layers "
            "before it are run again"
        )
    if plan.wafer.row_slices > 1:
        notes.append(
            f"Each row is computed in at most {plan.wafer.row_slices} slices, one after the other, wherever its tokens "
            "are independent: the values inside a layer do not fit a wafer's memory for a whole row"
        )
    return notes


def micro_batch_warnings(plan: plan_pb2.Plan) -> list[str]:
    """A line for the user if another size of micro-batches is taken than was asked for."""
    if not _is_replaced(plan):
        return []
    return [f"micro_batch_size={each.size} cannot be taken: {each.refusal}" for each in plan.explored]


def _is_replaced(plan: plan_pb2.Plan) -> bool:
    """Whether the size that was asked for was refused. Of sizes that are explored at least one is not."""
    return bool(plan.explored) and all(each.refusal for each in plan.explored)


# --- The report -------------------------------------------------------------------------------------------------------

# Version of the JSON form.
REPORT_FORMAT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """A layer, forward and backward together. Bytes and seconds are those of one wafer: all do the same at once.

    Attributes:
        layer: name of the layer.
        parameters: parameters of weights that no layer before it reads.
        flops: floating point operations for the whole batch.
        streamed_bytes: weights that a wafer receives; those streamed again for the backward pass count twice.
        gradient_bytes: gradients that a wafer sends.
        activation_bytes: values that its segments make for others.
        kernels: number of different kernels.
        library: library that runs them.
        reason: why this library.
        forward_seconds: predicted time of its forward pass.
        backward_seconds: predicted time of its backward pass.
    """

    layer: str
    parameters: int
    flops: int
    streamed_bytes: int
    gradient_bytes: int
    activation_bytes: int
    kernels: int
    library: str
    reason: str
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """A kernel of a MemoryX shard, over all its runs in a step.

    Attributes:
        kernel: number of the kernel.
        runs: number of runs.
        elements: elements of the states that it replaces.
        library: library that runs it.
        reason: why this library.
        seconds: predicted time.
    """

    kernel: int
    runs: int
    elements: int
    library: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """A MemoryX shard: its states and its work in a step.

    Attributes:
        shard: number of the shard.
        weight_bytes: states that the wafers read.
        other_bytes: all other states, such as the optimizer's and metrics.
        states: number of states.
        updates: its kernels.
    """

    shard: int
    weight_bytes: int
    other_bytes: int
    states: int
    updates: tuple[UpdateReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """The most memory of each process of a role. See OWN MEMORY and LINK MEMORY in plan.proto.

    Attributes:
        role: "wafer", "swarmx", "memoryx-0" and so on.
        own_bytes: its own memory.
        link_bytes: additional memory if its links are between hosts.
        relay_bytes: additional memory of SwarmX if only some of its links are between hosts.
    """

    role: str
    own_bytes: int
    link_bytes: int
    relay_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionReport:
    """A region of a pipelined wafer in a step. It is idle while it waits: before, between and after its work."""

    name: str
    busy_seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all layers, and the predicted time and rate of a step."""

    parameters: int
    flops: int
    streamed_bytes: int
    gradient_bytes: int
    wafer_kernels: int
    segments: int
    step_seconds: float
    rows_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A compile report.

    Attributes:
        format: REPORT_FORMAT.
        artifact: key of the plan.
        num_csx: number of wafers.
        num_shards: number of MemoryX shards.
        batch_rows: rows of the global batch.
        micro_batches: micro-batches of each wafer.
        micro_batch_notes: lines for the user on the micro-batches.
        half_gradients: whether gradients of weights travel in half precision.
        machine: the rates from which times are predicted.
        totals: sums over all layers.
        layers: the layers, in order.
        memory: the memory of a wafer.
        role_memory: the memory of each role's processes.
        shards: the MemoryX shards.
        floor_plan: the wafer, divided into regions.
        timeline: one step.
        regions: the regions of a pipelined wafer; empty in weight streaming.
        gathering: what is gathered in weight streaming.
    """

    format: int
    artifact: str
    num_csx: int
    num_shards: int
    batch_rows: int
    micro_batches: int
    micro_batch_notes: tuple[str, ...]
    half_gradients: bool
    machine: MachineModel
    totals: Totals
    layers: tuple[LayerReport, ...]
    memory: MemoryPlan | PipelineMemory
    role_memory: tuple[RoleMemory, ...]
    shards: tuple[ShardReport, ...]
    floor_plan: FloorPlan
    timeline: Timeline
    regions: tuple[RegionReport, ...] = ()
    gathering: Gathering = field(default_factory=Gathering)

    def to_json(self) -> str:
        """The report as JSON: the fields of these classes by their names, in bytes and seconds."""
        return json.dumps(dataclasses.asdict(self), indent=1)
