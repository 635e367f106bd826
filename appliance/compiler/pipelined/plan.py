"""Fills the pipeline of a plan, and checks that a step can be run in layer pipelined mode."""

from math import prod

from xdsl.ir import Operation, SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import ExecutionStrategy, Target
from appliance.compiler.cost.flops import VIEWS
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Numbers
from appliance.compiler.pipelined.build import Built, build
from appliance.compiler.pipelined.graph import WAY_OUT
from appliance.compiler.pipelined.memory import STREAMING, check_memory, plan_memory
from appliance.compiler.pipelined.program import make_program
from appliance.drawing.number_text import count_text
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import func_of
from wsc.v1 import plan_pb2

# The mode is for models of up to this size, as on the real system; larger ones are streamed.
MAX_PARAMETERS = 1_000_000_000
STREAM = f"use {STREAMING}"


def fill_pipeline(plan: plan_pb2.Plan, cut: Cut, target: Target) -> None:
    """Schedules the regions of the one wafer, and fills in the plans of the wafer, its workers and the coordinator.

    Raises:
        CompileError: the model is too large, or does not fit the wafer.
    """
    check_parameters(cut)
    numbers = Numbers()
    built = build(cut, target, numbers)
    plan.pipeline.CopyFrom(make_program(cut, built, numbers, target))
    pipeline = plan.pipeline
    pipeline.kernel_library = target.kernel_library.code
    pipeline.asynchronous_updates = target.asynchronous_updates
    pipeline.memory_bytes = target.wafer_memory_bytes
    profiles = profile_kernels(pipeline.kernels)
    runs = [i.run for region in pipeline.regions for i in region.instructions if i.HasField("run")]
    pipeline.flops = sum(profiles[run.kernel].flops for run in runs)
    memory = plan_memory(pipeline, profiles)
    pipeline.own_bytes = memory.own_bytes
    check_memory(memory, cut.sharding.batch_rows, target.num_parts)
    plan.worker.batch.CopyFrom(built.batch.group)
    plan.worker.global_rows = plan.worker.local_rows = cut.sharding.batch_rows
    plan.worker.micro_batches = target.num_parts
    _add_outputs(plan.coordinator, cut, built, numbers)


def check_target(target: Target, rows: int) -> None:
    """Checks that the target's number of wafers and replicas, and its way of updating, fit its execution strategy.

    Args:
        target: the target.
        rows: rows of a batch.

    Raises:
        CompileError: they do not.
    """
    if target.execution_strategy is not ExecutionStrategy.PIPELINE:
        if target.asynchronous_updates:
            raise CompileError(
                "in weight streaming weights are updated once in a step; use the execution strategy pipeline, or "
                f"{WAY_OUT.removeprefix('use ')}"
            )
        if target.num_replicas > 1:
            raise CompileError(
                f"in weight streaming a wafer has one model, not num_replicas={target.num_replicas}; use the execution "
                f"strategy pipeline, or num_csx={target.num_replicas} with num_replicas=1"
            )
        return
    if target.asynchronous_updates and target.num_replicas > 1:
        raise CompileError(
            f"asynchronous updates are those of one replica of a model, not of num_replicas={target.num_replicas}; use "
            f"num_replicas=1, or {WAY_OUT.removeprefix('use ')}"
        )
    if target.num_csx > 1:
        raise CompileError(
            f"layer pipelined mode runs a model on one wafer, not on num_csx={target.num_csx}; use num_csx=1, or "
            f"{STREAM}"
        )
    if rows % target.num_replicas:
        raise CompileError(
            f"a batch of {rows} samples cannot be divided evenly over num_replicas={target.num_replicas} replicas; "
            f"choose a batch size that is a multiple of {target.num_replicas}, or another num_replicas"
        )


def check_parameters(cut: Cut) -> None:
    """Raises CompileError if the model has more parameters than layer pipelined mode is for."""
    states = {func_of(cut.module).block.args[state.argument] for state in cut.names.states}
    weights = {root for value in cut.streamed if (root := _source(value)) in states}
    count = sum(prod(types.shape(weight)) for weight in weights)
    if count > MAX_PARAMETERS:
        raise CompileError(
            f"the model has {count_text(count)} parameters ({count}); layer pipelined mode is for models of at most "
            f"{count_text(MAX_PARAMETERS)}; {STREAM}"
        )


def _source(value: SSAValue) -> SSAValue:
    """The value that a value is a cast or a view of; itself if it is none."""
    while isinstance(value.owner, Operation) and (value.owner.name in VIEWS or value.owner.name == "cirh.Cast"):
        value = value.owner.operands[0]
    return value


def _add_outputs(plan: plan_pb2.CoordinatorPlan, cut: Cut, built: Built, numbers: Numbers) -> None:
    home = {value: bundle for bundle in built.sends for value in bundle.values}
    for name, value in cut.outputs:
        group = home[value].group
        gathered = group.reduction == plan_pb2.REDUCTION_GATHER
        placement = cut.sharding.used(value)
        plan.outputs.add(
            name=name,
            type=types.to_proto(value),
            group=group.id,
            value=numbers.value(value, 0 if gathered else built.parts_of_outputs[value]),
            gathered=gathered,
            dim=placement.dim,
            outer=placement.outer,
        )
    plan.groups.extend(bundle.group for bundle in built.sends)
