"""What a compile tells: each layer's size, work and predicted time, the wafer's memory, MemoryX's, the schedule."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Final

from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.pipelined.memory import PipelineMemory
from appliance.compiler.report.timeline import Timeline
from appliance.compiler.wafer_schedule.memory_plan import MemoryPlan
from appliance.drawing.floor_plan import FloorPlan
from appliance.drawing.number_text import bytes_text
from wsc.v1 import plan_pb2

# --- What a user is told of a plan's micro-batches --------------------------------------------------------------------


def micro_batch_notes(plan: plan_pb2.Plan) -> list[str]:
    """In lines; none where a wafer computes all its rows at once because nobody asked for less."""
    count, at_once = plan.worker.micro_batches, plan.wafer.micro_batches_at_once
    rows = plan.worker.local_rows // count
    notes = [
        f"micro_batch_size={each.size}: {each.refusal or f'{each.rows_per_second:,.0f} rows/s predicted'}"
        + ("" if each.refusal else f", {bytes_text(each.wafer_bytes)} of a wafer's memory")
        for each in plan.explored
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
        notes.append(f"Each wafer computes its {plan.worker.local_rows} rows in {count} micro-batches of {rows}, {how}")
    return notes


# ----------------------------------------------------------------------------------------------------------------------
# What a compile tells: each layer's size, work and predicted time, the wafer's memory, MemoryX's, the schedule
#
# All of it is read from the plan, so that a report can be made again from an artifact. Times are predictions: they rest
# on the rates of `MachineModel`, and are good for comparing layers, not for promising a rate.


# Of the JSON form.
REPORT_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """A layer, forward and backward together. Bytes and seconds are of one wafer; all wafers do the same at once."""

    layer: str
    parameters: int  # of weights that no layer before it reads
    flops: int  # of the whole batch
    streamed_bytes: int  # weights to a wafer; what is streamed again for the backward pass counts twice
    gradient_bytes: int  # from a wafer
    activation_bytes: int  # what its segments make for others
    kernels: int  # different ones
    library: str
    reason: str  # why that library
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """A kernel of a MemoryX shard, with all that it is run on in a step."""

    kernel: int
    runs: int
    elements: int  # of the states that it replaces
    library: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """A MemoryX shard: what it holds, and what it does in a step."""

    shard: int
    weight_bytes: int  # states that the wafers read
    other_bytes: int  # all other state: the optimizer's, metrics'
    states: int
    updates: tuple[UpdateReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """The most that each process of a role has in memory. See OWN MEMORY and LINK MEMORY in plan.proto."""

    role: str  # "wafer", "swarmx", "memoryx-0" and so on
    own_bytes: int
    link_bytes: int  # besides, if its links are between hosts
    relay_bytes: int  # besides, of SwarmX if only some of them are


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionReport:
    """A region of a pipelined wafer in a step. Idle: it waits for others, before, between and behind its work."""

    name: str
    busy_seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Over all layers."""

    parameters: int
    flops: int
    streamed_bytes: int
    gradient_bytes: int
    wafer_kernels: int
    segments: int
    step_seconds: float  # predicted
    rows_per_second: float  # predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole report."""

    format: int
    artifact: str
    num_csx: int
    num_shards: int
    batch_rows: int
    micro_batches: int  # of each wafer
    micro_batch_notes: tuple[str, ...]  # what the user is told of them
    half_gradients: bool  # those of weights travel in half
    machine: MachineModel
    totals: Totals
    layers: tuple[LayerReport, ...]
    memory: MemoryPlan | PipelineMemory
    role_memory: tuple[RoleMemory, ...]
    shards: tuple[ShardReport, ...]
    floor_plan: FloorPlan
    timeline: Timeline
    regions: tuple[RegionReport, ...] = ()  # of a pipelined wafer

    def to_json(self) -> str:
        """The report as JSON: the fields of these classes by their names, in their units (bytes, seconds)."""
        return json.dumps(dataclasses.asdict(self), indent=1)
