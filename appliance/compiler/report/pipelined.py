"""Makes the report of a plan in layer pipelined mode: its regions, their timeline and their memory."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from appliance.compiler.core.target import KernelLibrary
from appliance.compiler.cost.kernel_profile import KernelProfile, loop_time, operations_time, profile_kernels
from appliance.compiler.cost.machine_model import MachineModel
from appliance.compiler.partition.layers import BACKWARD
from appliance.compiler.pipelined.graph import UPDATE
from appliance.compiler.pipelined.memory import plan_memory
from appliance.compiler.pipelined.order import instructions
from appliance.compiler.report.report import (
    REPORT_FORMAT,
    LayerReport,
    RegionReport,
    Report,
    RoleMemory,
    Totals,
    micro_batch_notes,
)
from appliance.compiler.report.timeline import ScheduleStuck, Span, Timeline
from appliance.drawing.floor_plan import HEIGHT, WIDTH, FloorPlan, Region
from waferbox.lair.lower import NotLowered, lower
from waferbox.links.elements import tensor_bytes
from waferbox.runtime.schedule import makes_and_reads
from wsc.v1 import plan_pb2


def pipeline_report(plan: plan_pb2.Plan, artifact: str, machine: MachineModel) -> Report:
    """The report of a plan with a pipeline, as `make_report`."""
    pipeline = plan.pipeline
    profiles = profile_kernels(pipeline.kernels)
    seconds = {number: _seconds(profile, machine) for number, profile in profiles.items()}
    timeline = simulate_pipeline(pipeline, seconds)
    layers = tuple(_layers(pipeline, profiles, seconds))
    busy = [0.0] * len(pipeline.regions)
    for (region, _), instruction in instructions(pipeline):
        busy[region] += seconds.get(instruction.run.kernel, 0.0)
    regions = tuple(
        RegionReport(name=region.name, busy_seconds=work, idle_seconds=max(timeline.step_seconds - work, 0.0))
        for region, work in zip(pipeline.regions, busy, strict=True)
    )
    places = tuple(
        Region(layer=region.name, x=region.x, y=region.y, width=region.width, height=region.height)
        for region in pipeline.regions
    )
    return Report(
        format=REPORT_FORMAT,
        artifact=artifact,
        num_csx=plan.num_csx,
        num_shards=plan.num_shards,
        batch_rows=plan.batch_rows,
        micro_batches=pipeline.micro_batches,
        micro_batch_notes=tuple(micro_batch_notes(plan)),
        half_gradients=False,
        machine=machine,
        totals=Totals(
            parameters=sum(layer.parameters for layer in layers),
            flops=sum(layer.flops for layer in layers),
            streamed_bytes=0,
            gradient_bytes=sum(layer.gradient_bytes for layer in layers),
            wafer_kernels=len(pipeline.kernels),
            segments=sum(1 for _, instruction in instructions(pipeline) if instruction.HasField("run")),
            step_seconds=timeline.step_seconds,
            rows_per_second=plan.batch_rows / timeline.step_seconds if timeline.step_seconds else 0.0,
        ),
        layers=layers,
        memory=plan_memory(pipeline, profiles),
        role_memory=(RoleMemory(role="wafer", own_bytes=pipeline.own_bytes, link_bytes=0, relay_bytes=0),),
        shards=(),
        floor_plan=FloorPlan(width=WIDTH, height=HEIGHT, regions=places),
        timeline=timeline,
        regions=regions,
    )


def _seconds(profile: KernelProfile, machine: MachineModel) -> float:
    if not profile.output_bytes:
        return 0.0  # a Run without results only waits
    try:
        lower(profile.module)
    except NotLowered:
        return operations_time(profile.module, machine)
    return loop_time(profile.module, machine)


def simulate_pipeline(plan: plan_pb2.PipelinePlan, seconds: Mapping[int, float]) -> Timeline:
    """Simulates one step, in which each region has a core of its own.

    Args:
        plan: the pipeline.
        seconds: predicted time of each kernel.

    Raises:
        ScheduleStuck: regions wait for one another.
    """
    groups = {group.id: group for group in plan.groups}
    lists = [[(i, *makes_and_reads(i, groups)) for i in region.instructions] for region in plan.regions]
    missing: dict[int, int] = defaultdict(int)
    for makes in (makes for listed in lists for _, makes, _ in listed):
        for value in makes:
            missing[value] += 1
    complete: dict[int, float] = defaultdict(float)  # by value: when it is complete
    free = [0.0] * len(lists)
    begun = [0] * len(lists)
    spans: list[Span] = []
    moved = True
    while moved:
        moved = False
        for number, listed in enumerate(lists):
            for instruction, makes, reads in listed[begun[number] :]:
                if any(missing[value] for value in reads):
                    break
                moved = True
                begun[number] += 1
                begin = max([free[number], *(complete[value] for value in reads)])
                end = free[number] = begin + seconds.get(instruction.run.kernel, 0.0)
                if end > begin:
                    spans.append(_span(number, instruction.run, begin, end))
                for value in makes:
                    missing[value] -= 1
                    complete[value] = max(complete[value], end)
    if begun != [len(listed) for listed in lists]:
        raise ScheduleStuck("the regions wait for one another")
    spans.sort(key=lambda span: (span.track, span.begin))
    busy = sum(span.end - span.begin for span in spans) / len(lists)
    return Timeline(step_seconds=max(free, default=0.0), wafer_busy_seconds=busy, spans=tuple(spans))


def _span(region: int, run: plan_pb2.Run, begin: float, end: float) -> Span:
    micro_batch = None if run.layer.endswith(UPDATE) else run.micro_batch
    return Span(track=f"region-{region}", label=run.layer, begin=begin, end=end, micro_batch=micro_batch)


@dataclass(slots=True)
class _Layer:
    """The sums of a layer."""

    kernels: set[int] = field(default_factory=set)
    choices: dict[str, None] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    parameters: int = 0
    flops: int = 0
    activation_bytes: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


def _layers(
    plan: plan_pb2.PipelinePlan, profiles: Mapping[int, KernelProfile], seconds: Mapping[int, float]
) -> Iterator[LayerReport]:
    joined = {value.value: tensor_bytes(value.type) for value in plan.joined}
    weights = {slot.value: prod(slot.type.shape) for slot in plan.states}
    found: dict[str, _Layer] = {}
    for _, instruction in instructions(plan):
        run = instruction.run
        if not run.outputs or run.layer.endswith(UPDATE):
            continue
        profile = profiles[run.kernel]
        layer = found.setdefault(run.layer.removesuffix(BACKWARD), _Layer())
        layer.kernels.add(run.kernel)
        layer.choices.update(dict.fromkeys(profile.choices))
        layer.flops += profile.flops
        made = zip(run.outputs, profile.output_bytes, strict=True)
        layer.activation_bytes += sum(nbytes for value, nbytes in made if value not in joined)
        layer.joined.update(value for value in run.outputs if value in joined)
        layer.parameters += sum(weights.pop(value, 0) for value in run.inputs)
        if run.layer.endswith(BACKWARD):
            layer.backward_seconds += seconds[run.kernel]
        else:
            layer.forward_seconds += seconds[run.kernel]
    library = KernelLibrary.from_proto(plan.kernel_library).value
    for name, layer in found.items():
        yield LayerReport(
            layer=name,
            parameters=layer.parameters,
            flops=layer.flops,
            streamed_bytes=0,
            gradient_bytes=sum(joined[value] for value in layer.joined),
            activation_bytes=layer.activation_bytes,
            kernels=len(layer.kernels),
            library=library,
            reason="; ".join((f"kernels of layers are run by {library}", *layer.choices)),
            forward_seconds=layer.forward_seconds,
            backward_seconds=layer.backward_seconds,
        )
