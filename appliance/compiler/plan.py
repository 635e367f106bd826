"""The plan: every role's part, put together."""

from xdsl.ir import SSAValue

from appliance.compiler.core.target import HALF_TYPES, Target
from appliance.compiler.cost.kernel_profile import profile_kernels
from appliance.compiler.cost.link_memory import set_link_bytes
from appliance.compiler.memoryx.exchanges import find_exchanges, find_output
from appliance.compiler.memoryx.memory_plan import adding_node_bytes, shard_bytes
from appliance.compiler.memoryx.schedule import ShardScheduler
from appliance.compiler.partition.cut import Cut
from appliance.compiler.partition.groups import Bundle, Numbers
from appliance.compiler.partition.shards import divide
from appliance.compiler.wafer.arena import lay_out_arena
from appliance.compiler.wafer.memory_plan import check_memory, plan_memory
from appliance.compiler.wafer.schedule import WaferSchedule, schedule_wafer
from cirh.dialect import types
from wsc.v1 import plan_pb2

# Of the messages in plan.proto, and of what roles may rely on. A cached plan of another format is compiled again.
PLAN_FORMAT = 6


def make_plan(cut: Cut, target: Target) -> plan_pb2.Plan:
    """Schedules every role.

    Raises:
        CompileError: the step does not fit a wafer, or cannot be scheduled.
    """
    numbers = Numbers()
    sharing = divide(cut, target)
    wafer = schedule_wafer(cut, sharing, target, numbers)
    wafer.plan.memory_bytes = target.wafer_memory_bytes
    wafer.plan.kernel_library = target.kernel_library.code
    profiles = profile_kernels(wafer.plan.kernels)
    wafer.plan.flops = sum(profiles[i.run.kernel].flops for i in wafer.plan.instructions if i.HasField("run"))
    wafer.plan.arena.CopyFrom(lay_out_arena(wafer.plan))
    memory = plan_memory(wafer.plan, profiles, target.wafer_memory_bytes)
    wafer.plan.own_bytes = memory.own_bytes
    check_memory(memory, target.num_csx, cut.sharding.batch_rows)
    exchanges, output = find_exchanges(cut, sharing, numbers), find_output(cut, numbers)
    rows = cut.sharding.batch_rows
    plan = plan_pb2.Plan(format=PLAN_FORMAT, num_csx=target.num_csx, num_shards=target.num_shards, batch_rows=rows)
    plan.wafer.CopyFrom(wafer.plan)
    for shard in range(target.num_shards):
        scheduler = ShardScheduler(cut, sharing, wafer, exchanges, output, target, numbers, shard)
        plan.memoryx.append(scheduler.schedule())
        plan.memoryx[-1].arena.CopyFrom(wafer.plan.arena)
        plan.memoryx[-1].own_bytes = shard_bytes(plan.memoryx[-1])
    # A group that is loaded twice in a step is listed twice: SwarmX counts what is still to come.
    plan.swarmx.groups.extend(
        [*(load.bundle.group for load in wafer.loads), *(d.bundle.group for d in wafer.departures)]
    )
    plan.swarmx.arena.CopyFrom(wafer.plan.arena)
    plan.swarmx.own_bytes = adding_node_bytes(plan.swarmx, target.num_csx)
    set_link_bytes(plan)
    plan.worker.batch.CopyFrom(wafer.batch)
    plan.worker.global_rows, plan.worker.local_rows = rows, rows // target.num_csx
    _add_outputs(plan.coordinator, cut, numbers, wafer, output)
    if target.precision is not None:
        plan.precision.half = HALF_TYPES[target.precision.half]
        plan.precision.optimization_level = target.precision.level
    return plan


def _add_outputs(
    plan: plan_pb2.CoordinatorPlan, cut: Cut, numbers: Numbers, wafer: WaferSchedule, output: Bundle | None
) -> None:
    """Where the client's tensors come from, and how parts are put together."""
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
