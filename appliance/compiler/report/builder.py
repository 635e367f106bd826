"""Makes the report of a plan in weight streaming; `pipelined.py` makes that of a pipeline."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final

from appliance.compiler.core.target import KernelLibrary
from appliance.compiler.cost.kernel_profile import KernelProfile, loop_time, operations_time, profile_kernels
from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.partition.layers import BACKWARD
from appliance.compiler.report.gathers import gathering_of
from appliance.compiler.report.pipelined import pipeline_report
from appliance.compiler.report.report import (
    REPORT_FORMAT,
    LayerReport,
    Report,
    RoleMemory,
    ShardReport,
    Totals,
    UpdateReport,
    micro_batch_notes,
)
from appliance.compiler.report.timeline import simulate
from appliance.compiler.wafer_schedule.memory_plan import plan_memory
from appliance.compiler.wafer_schedule.segment_runs import is_rounding
from appliance.drawing.floor_plan import HEIGHT, WIDTH, FloorPlan, plan_floor
from waferbox.lair.lower import NotLowered, lower
from waferbox.links.elements import tensor_bytes
from waferbox.runtime.loops import with_times
from wsc.v1 import plan_pb2

_LAYER_REASONS: Final = {
    "aten": "direct calls into torch: for layers, generated kernels gain nothing on a CPU",
    "inductor": "requested by csx.performance.kernel_library",
}
_LOOP_REASON: Final = "element by element: one generated loop, or blocks of torch calls where there is no C++ compiler"


def make_report(plan: plan_pb2.Plan, artifact: str, machine: MachineModel) -> Report:
    """Makes the report of a consistent plan (`check_plan`).

    Args:
        plan: the plan.
        artifact: key of the plan.
        machine: the rates from which times are predicted.
    """
    if plan.HasField("pipeline"):
        return pipeline_report(plan, artifact, machine)
    profiles = profile_kernels(plan.wafer.kernels)
    seconds = {number: operations_time(profile.module, machine) for number, profile in profiles.items()}
    sums = {joined.value for joined in plan.wafer.joined}
    shards = [_Shard(part, machine) for part in plan.memoryx]

    def wafer_time(run: plan_pb2.Run) -> float:
        return seconds[run.kernel]

    def memoryx_time(shard: int, run: plan_pb2.Run) -> float:
        return shards[shard].seconds[run.kernel]

    timeline = simulate(plan, machine, wafer_time, memoryx_time)
    weights = {value: state for shard in shards for value, state in shard.weights().items()}
    layers = tuple(_layers(plan, profiles, seconds, weights))
    work = [(layer.layer, layer.forward_seconds + layer.backward_seconds) for layer in layers]
    work = [(layer, amount) for layer, amount in work if amount > 0]
    return Report(
        format=REPORT_FORMAT,
        artifact=artifact,
        num_csx=plan.num_csx,
        num_shards=plan.num_shards,
        batch_rows=plan.batch_rows,
        micro_batches=plan.wafer.micro_batches,
        micro_batch_notes=tuple(micro_batch_notes(plan)),
        half_gradients=plan.precision.half_gradients,
        machine=machine,
        totals=Totals(
            parameters=sum(layer.parameters for layer in layers),
            flops=sum(layer.flops for layer in layers),
            streamed_bytes=sum(layer.streamed_bytes for layer in layers),
            gradient_bytes=sum(layer.gradient_bytes for layer in layers),
            wafer_kernels=len(plan.wafer.kernels),
            segments=sum(run.micro_batch == 0 and not is_rounding(run, sums) for run in _runs(plan.wafer.instructions)),
            step_seconds=timeline.step_seconds,
            rows_per_second=plan.batch_rows / timeline.step_seconds if timeline.step_seconds else 0.0,
        ),
        layers=layers,
        memory=plan_memory(plan.wafer, profiles, plan.wafer.memory_bytes),
        role_memory=tuple(_role_memory(plan)),
        shards=tuple(shard.report(weights) for shard in shards),
        # Each layer needs a row and a column of cores: no floor plan for more layers.
        floor_plan=FloorPlan(
            width=WIDTH, height=HEIGHT, regions=plan_floor(work) if len(work) <= min(WIDTH, HEIGHT) else ()
        ),
        timeline=timeline,
        gathering=gathering_of(plan, machine, timeline, wafer_time, memoryx_time),
    )


def _role_memory(plan: plan_pb2.Plan) -> Iterator[RoleMemory]:
    wafer, swarmx = plan.wafer, plan.swarmx
    yield RoleMemory(role="wafer", own_bytes=wafer.own_bytes, link_bytes=wafer.link_bytes, relay_bytes=0)
    if plan.num_csx > 1:
        yield RoleMemory(
            role="swarmx", own_bytes=swarmx.own_bytes, link_bytes=swarmx.link_bytes, relay_bytes=swarmx.relay_bytes
        )
    for part in plan.memoryx:
        role = f"memoryx-{part.shard}"
        yield RoleMemory(role=role, own_bytes=part.own_bytes, link_bytes=part.link_bytes, relay_bytes=0)


@dataclass(slots=True)
class _Layer:
    """The sums of a layer."""

    kernels: set[int]
    choices: dict[str, None] = field(default_factory=dict)
    parameters: int = 0
    flops: int = 0
    streamed_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


def _layers(
    plan: plan_pb2.Plan,
    profiles: Mapping[int, KernelProfile],
    seconds: Mapping[int, float],
    weights: Mapping[int, plan_pb2.StateSlot],
) -> Iterator[LayerReport]:
    groups = {group.id: group for group in plan.wafer.groups}
    reduced = {
        member.value
        for group in plan.wafer.groups
        if group.kind == plan_pb2.GROUP_KIND_REDUCTION
        for member in group.members
    } | {joined.value for joined in plan.wafer.joined}
    found: dict[str, _Layer] = {}
    counted: set[str] = set()
    received = 0
    layer = _Layer(set())
    for instruction, times in with_times(plan.wafer.instructions, plan.wafer.loop):
        match instruction.WhichOneof("kind"):
            case "receive":
                group = groups[instruction.receive.group]
                received += group.nbytes * times if group.kind == plan_pb2.GROUP_KIND_WEIGHTS else 0
            case "send":
                layer.gradient_bytes += groups[instruction.send.group].nbytes * times
            case "run":
                run = instruction.run
                profile = profiles[run.kernel]
                layer = found.setdefault(run.layer.removesuffix(BACKWARD), _Layer(set()))
                layer.kernels.add(run.kernel)
                layer.choices.update(dict.fromkeys(profile.choices))
                layer.flops += profile.flops * plan.num_csx * times
                layer.streamed_bytes, received = layer.streamed_bytes + received, 0
                layer.activation_bytes += times * sum(
                    nbytes
                    for value, nbytes in zip(run.outputs, profile.output_bytes, strict=True)
                    if value not in reduced
                )
                if run.layer.endswith(BACKWARD):
                    layer.backward_seconds += seconds[run.kernel] * times
                else:
                    layer.forward_seconds += seconds[run.kernel] * times
                for state in (weights[value] for value in run.inputs if value in weights):
                    if state.name not in counted:
                        counted.add(state.name)
                        layer.parameters += prod(state.type.shape)
    library = KernelLibrary.from_proto(plan.wafer.kernel_library).value
    for name, layer in found.items():
        yield LayerReport(
            layer=name,
            parameters=layer.parameters,
            flops=layer.flops,
            streamed_bytes=layer.streamed_bytes,
            gradient_bytes=layer.gradient_bytes,
            activation_bytes=layer.activation_bytes,
            kernels=len(layer.kernels),
            library=library,
            reason="; ".join((_LAYER_REASONS[library], *layer.choices)),
            forward_seconds=layer.forward_seconds,
            backward_seconds=layer.backward_seconds,
        )


class _Shard:
    """A MemoryX shard, of which a report is made."""

    def __init__(self, plan: plan_pb2.MemoryXPlan, machine: MachineModel) -> None:
        self._plan = plan
        self._profiles = profile_kernels(plan.kernels)
        # By kernel that is not a loop: the reason.
        self._obstacles: dict[int, str] = {}
        for number, profile in self._profiles.items():
            try:
                lower(profile.module)
            except NotLowered as obstacle:
                self._obstacles[number] = str(obstacle)
        self._slots = {slot.value: slot for slot in plan.states}
        self.seconds = {
            number: (operations_time if number in self._obstacles else loop_time)(profile.module, machine)
            for number, profile in self._profiles.items()
        }

    def weights(self) -> dict[int, plan_pb2.StateSlot]:
        """By value that is streamed to the wafers: the state that it is, or is a cast or a view of."""
        made = {}
        for run in _runs(self._plan.instructions):
            sources = self._profiles[run.kernel].output_sources
            for value, source in zip(run.outputs, sources, strict=True):
                if source is not None and run.inputs[source] in self._slots:
                    made[value] = self._slots[run.inputs[source]]
        streamed = [g for g in self._plan.groups if g.kind == plan_pb2.GROUP_KIND_WEIGHTS]
        values = [member.value for group in streamed for member in group.members]
        return {value: slot for value in values if (slot := self._slots.get(value) or made.get(value)) is not None}

    def report(self, weights: Mapping[int, plan_pb2.StateSlot]) -> ShardReport:
        names = {slot.name for slot in weights.values()}
        sizes = {slot.name: tensor_bytes(slot.type) for slot in self._plan.states}
        weight_bytes = sum(nbytes for name, nbytes in sizes.items() if name in names)
        return ShardReport(
            shard=self._plan.shard,
            weight_bytes=weight_bytes,
            other_bytes=sum(sizes.values()) - weight_bytes,
            states=len(sizes),
            updates=tuple(self._updates()),
        )

    def _updates(self) -> Iterator[UpdateReport]:
        runs = Counter(run.kernel for run in _runs(self._plan.instructions))
        elements: Counter[int] = Counter()
        for run in _runs(self._plan.instructions):
            elements[run.kernel] += sum(prod(self._slots[state].type.shape) for state in run.commits if state)
        for kernel, count in runs.items():
            obstacle = self._obstacles.get(kernel)
            yield UpdateReport(
                kernel=kernel,
                runs=count,
                elements=elements[kernel],
                library="lair" if obstacle is None else "aten",
                reason=_LOOP_REASON if obstacle is None else f"no loop: {obstacle}",
                seconds=self.seconds[kernel] * count,
            )


def _runs(instructions: Iterable[plan_pb2.Instruction]) -> Iterator[plan_pb2.Run]:
    return (i.run for i in instructions if i.WhichOneof("kind") == "run")
