"""Makes the plan of a step: the parts of all roles, put together."""

from xdsl.ir import SSAValue

from appliance.compiler.core.target import HALF_TYPES, ExecutionStrategy, Target
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.cost.link_memory import set_link_bytes
from appliance.compiler.memoryx_schedule.memory_plan import adding_node_bytes, shard_bytes
from appliance.compiler.memoryx_schedule.schedule import ShardScheduler, find_exchanges, find_output
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Bundle, Numbers
from appliance.compiler.partition.shards import Sharing, divide
from appliance.compiler.pipelined.plan import fill_pipeline
from appliance.compiler.sharding.gathered import gathered_values, reason_of
from appliance.compiler.wafer_schedule.arena import lay_out_arena
from appliance.compiler.wafer_schedule.memory_plan import MemoryPlan, check_memory, plan_memory
from appliance.compiler.wafer_schedule.schedule import WaferSchedule, schedule_wafer
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.locations import source_of
from wsc.v1 import plan_pb2

# Version of the messages in plan.proto and of their meaning. A cached plan of another format is compiled again.
PLAN_FORMAT = 12


def make_plan(cut: Cut, target: Target) -> plan_pb2.Plan:
    """Schedules all roles.

    Raises:
        CompileError: the step does not fit a wafer, or cannot be scheduled.
    """
    rows = cut.sharding.batch_rows
    plan = plan_pb2.Plan(format=PLAN_FORMAT, num_csx=target.num_csx, num_shards=target.num_shards, batch_rows=rows)
    if target.precision is not None:
        plan.precision.half = HALF_TYPES[target.precision.half]
        plan.precision.optimization_level = target.precision.level
        plan.precision.half_gradients = target.precision.half_gradients
    if target.execution_strategy is ExecutionStrategy.PIPELINE:
        fill_pipeline(plan, cut, target)
    else:
        _stream(plan, cut, target)
    plan.worker.input_names.extend(argument.name for argument in cut.names.inputs)
    return plan


def _stream(plan: plan_pb2.Plan, cut: Cut, target: Target) -> None:
    """Fills in the wafers, MemoryX and SwarmX, for weight streaming."""
    rows = cut.sharding.batch_rows
    sharing = divide(cut, target)
    numbers, wafer = _fit_wafer(cut, sharing, target)
    exchanges, output = find_exchanges(cut, sharing, numbers), find_output(cut, numbers)
    plan.wafer.CopyFrom(wafer.plan)
    for shard in range(target.num_shards):
        scheduler = ShardScheduler(cut, sharing, wafer, exchanges, output, target, numbers, shard)
        plan.memoryx.append(scheduler.schedule())
        plan.memoryx[-1].arena.CopyFrom(wafer.plan.arena)
        plan.memoryx[-1].own_bytes = shard_bytes(plan.memoryx[-1])
    # A group that is loaded twice in a step is listed twice: SwarmX counts the messages that it expects.
    plan.swarmx.groups.extend(
        [*(load.bundle.group for load in wafer.loads), *(d.bundle.group for d in wafer.departures)]
    )
    plan.swarmx.arena.CopyFrom(wafer.plan.arena)
    plan.swarmx.own_bytes = adding_node_bytes(plan.swarmx, target.num_csx)
    for value, op in gathered_values(cut.module, cut.sharding).items():
        plan.gathered.add(value=numbers.value(value), source=str(source_of(op)), reason=reason_of(op))
    set_link_bytes(plan)
    plan.worker.batch.CopyFrom(wafer.batch)
    plan.worker.global_rows, plan.worker.local_rows = rows, rows // target.num_csx
    plan.worker.micro_batches = target.micro_batches
    _add_outputs(plan.coordinator, cut, numbers, wafer, output)


def _fit_wafer(cut: Cut, sharing: Sharing, target: Target) -> tuple[Numbers, WaferSchedule]:
    """The wafer's part, with as many micro-batches at once as fit its memory: weights are then streamed least often."""
    possible = [at_once for at_once in range(1, target.micro_batches + 1) if target.micro_batches % at_once == 0]

    def fitted(at_once: int) -> tuple[Numbers, WaferSchedule, MemoryPlan]:
        numbers = Numbers()
        wafer = schedule_wafer(cut, sharing, target, numbers, at_once)
        plan = wafer.plan
        plan.memory_bytes = target.wafer_memory_bytes
        plan.kernel_library = target.kernel_library.code
        profiles = profile_kernels(plan.kernels)
        plan.flops = sum(profiles[i.run.kernel].flops for i in plan.instructions if i.HasField("run"))
        plan.arena.CopyFrom(lay_out_arena(plan))
        memory = plan_memory(plan, profiles, target.wafer_memory_bytes)
        plan.own_bytes = memory.own_bytes
        return numbers, wafer, memory

    numbers, wafer, memory = fitted(possible[-1])
    if memory.fits or len(possible) == 1:
        check_memory(memory, target.num_csx, cut.sharding.batch_rows, target.micro_batches)
        return numbers, wafer
    numbers, wafer, memory = fitted(1)
    check_memory(memory, target.num_csx, cut.sharding.batch_rows, target.micro_batches, wafer.whole_batch_first)
    # Bisection: possible[low] fits, possible[high] does not, and memory grows with the number at once.
    low, high = 0, len(possible) - 1
    while high - low > 1:
        middle = (low + high) // 2
        tried = fitted(possible[middle])
        if tried[2].fits:
            low, (numbers, wafer, memory) = middle, tried
        else:
            high = middle
    return numbers, wafer


def _add_outputs(
    plan: plan_pb2.CoordinatorPlan, cut: Cut, numbers: Numbers, wafer: WaferSchedule, output: Bundle | None
) -> None:
    """Fills in the group of each output, and the dimension in which its parts are put together."""
    bundles = [d.bundle for d in wafer.departures if d.bundle.group.to_coordinator]
    if output is not None:
        bundles.append(output)
    home: dict[SSAValue, Bundle] = {value: bundle for bundle in bundles for value in bundle.values}
    for name, value in cut.outputs:
        placement = cut.sharding.used(value)
        plan.outputs.add(
            name=name,
            type=types.to_proto(value),
            group=home[value].id,
            value=numbers.value(value),
            gathered=placement.is_sharded,
            dim=placement.dim,
            outer=placement.outer,
        )
    plan.groups.extend(bundle.group for bundle in bundles)
