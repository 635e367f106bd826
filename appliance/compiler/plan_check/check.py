"""Checks that a plan read from disk is consistent, before any role gets it.

The roles' programs are followed with the types of their values: each value exists when it is read, with the expected
type, and each message that a role waits for is sent. That the plan computes the user's step is not checked here: it is
ensured by the artifact's authenticated hash.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from typing import Final

import torch

from appliance.compiler.core.target import KernelLibrary
from appliance.compiler.cost.link_memory import set_link_bytes
from appliance.compiler.memoryx_schedule.memory_plan import late_gradients
from appliance.compiler.plan_check.pipeline import check_pipeline
from appliance.compiler.plan_check.roles import Groups, PlanError, Role, require
from appliance.compiler.plan_check.wafer_loop import WaferLoop
from appliance.compiler.wafer_schedule.arena import is_sent_where_it_is_written, lay_out_arena
from appliance.compiler.wafer_schedule.segment_runs import is_rounding
from waferbox.cirh import CirhError
from waferbox.cirh.dialect.types import TensorInfo, from_proto
from waferbox.links.elements import tensor_bytes
from waferbox.runtime.loops import with_times
from wsc.v1 import plan_pb2

__all__ = ["PlanError", "check_plan"]

# The type of the number of a part of the batch.
_NUMBER: Final = TensorInfo((1,), torch.int64)


def check_plan(plan: plan_pb2.Plan) -> None:
    """Raises PlanError unless the plan is consistent."""
    try:
        _check_input_names(plan.worker)
        if plan.HasField("pipeline"):
            check_pipeline(plan)
            _check_outputs(plan, plan.pipeline.micro_batches)
            return
        _check_sizes(plan)
        groups = Groups(plan)
        wafer = Role("the wafer", plan.wafer.groups, plan.wafer.kernels)
        rounds = _check_wafer(plan.wafer, wafer)
        shards = [Role(f"shard {p.shard}", p.groups, p.kernels) for p in plan.memoryx]
        for part, shard in zip(plan.memoryx, shards, strict=True):
            _check_shard(part, shard)
            _check_rounds(plan.wafer, part, shard, rounds)
        _check_states(plan)
        _check_gathered(plan)
        _check_arena(plan)
        groups.check_traffic(plan, wafer, shards)
        _check_link_memory(plan)
        _check_outputs(plan, plan.num_csx * plan.wafer.micro_batches)
    except PlanError:
        raise
    except (CirhError, ValueError) as error:
        raise PlanError(str(error)) from error


def _check_input_names(worker: plan_pb2.WorkerPlan) -> None:
    names, members = worker.input_names, len(worker.batch.members)
    require(len(names) * worker.micro_batches == members, "the batch has members that no input is named for")
    require(len(set(names)) == len(names), "two inputs have one name")


def _check_sizes(plan: plan_pb2.Plan) -> None:
    require(plan.num_csx >= 1 and plan.num_shards >= 1, "there is no wafer or no shard")
    require([part.shard for part in plan.memoryx] == list(range(plan.num_shards)), "shards are missing or misplaced")
    worker = plan.worker
    require(worker.global_rows == plan.batch_rows, "workers and plan differ in the rows of a batch")
    require(worker.local_rows * plan.num_csx == worker.global_rows, "the batch is not divided over the wafers")
    micro_batches, at_once = plan.wafer.micro_batches, plan.wafer.micro_batches_at_once
    require(micro_batches >= 1 and worker.local_rows % micro_batches == 0, "rows are not divided into micro-batches")
    require(worker.micro_batches == micro_batches, "workers and wafers differ in the micro-batches")
    require(at_once >= 1 and micro_batches % at_once == 0, "micro-batches are not divided into rounds")
    require(plan.wafer.memory_bytes > 0, "a wafer has no memory")
    KernelLibrary.from_proto(plan.wafer.kernel_library)


def _check_wafer(plan: plan_pb2.WaferPlan, role: Role) -> Mapping[int, int]:
    """Follows the wafer's program. Returns the values to which one round alone adds its parts, with its number."""
    numbers = set(plan.number_values)
    require(len(plan.number_values) in (0, plan.micro_batches), "not every part of the batch has a number")
    require(0 not in numbers and len(numbers) == len(plan.number_values), "the numbers of parts are not distinct")
    role.values.update(dict.fromkeys(numbers, _NUMBER))
    reductions = [group for group in plan.groups if group.kind == plan_pb2.GROUP_KIND_REDUCTION]
    joined = {
        member.value for group in reductions if group.reduction != plan_pb2.REDUCTION_GATHER for member in group.members
    }
    sums = {member.value: from_proto(member.type) for member in plan.joined}
    _check_sums(plan, sums, joined)
    joined |= sums.keys()
    made: Counter[int] = Counter()  # by joined value: the number of micro-batches that have made a part
    first: dict[int, int] = {}  # by joined value: the first of them
    parts = dict(zip(plan.number_values, range(plan.micro_batches), strict=False))  # by value: its micro-batch
    before: plan_pb2.Run | None = None
    loop = WaferLoop(plan, role, parts, made)
    for position, instruction in enumerate(plan.instructions):
        loop.reach(position)
        match instruction.WhichOneof("kind"):
            case "receive":
                require(not instruction.receive.keep, "the wafer keeps what it receives until it drops it")
                require(not instruction.receive.adds_to, "the wafer adds what it receives")
                group = role.receive(instruction.receive.group)
                if group.kind == plan_pb2.GROUP_KIND_BATCH:
                    members = enumerate(group.members)
                    parts.update((member.value, index % plan.micro_batches) for index, member in members)
            case "run":
                require(not instruction.run.commits, "the wafer has no states to commit to")
                run = instruction.run
                if is_rounding(run, sums):
                    _check_rounding(plan, role, run, sums, made)
                    continue
                _check_segment_run(plan, before, run)
                loop.check_run(run)
                before = run
                role.run(run, joined=joined)
                parts.update((value, run.micro_batch) for value in run.outputs if value not in joined)
                own = all(parts.get(value, run.micro_batch) == run.micro_batch for value in run.inputs)
                require(own, "a micro-batch reads what belongs to another")
                role.drop(run)
                for value in joined.intersection(run.outputs):
                    follows = run.micro_batch == first.setdefault(value, run.micro_batch) + made[value]
                    require(follows, "a micro-batch's part of a value is missing, or there twice")
                    require(role.used.isdisjoint((value,)), f"value {value} is read before all its parts are there")
                    made[value] += 1
            case "send":
                role.send(instruction.send.group)
            case kind:
                raise PlanError(f"a wafer has no instruction {kind}")
    require(before is None or before.micro_batch == plan.micro_batches - 1, "the last segment run lacks micro-batches")
    rounds: dict[int, int] = {}
    for value, count in made.items():
        if count < plan.micro_batches and value not in sums:
            rounds[value], rest = divmod(first[value], plan.micro_batches_at_once)
            whole = not rest and count == plan.micro_batches_at_once
        else:
            whole = count == plan.micro_batches
        require(whole, "a value lacks the parts of some micro-batches")
    if numbers:
        others = {member.value for group in plan.groups for member in group.members} | role.made
        require(
            numbers <= role.used and numbers.isdisjoint(others), "a part's number is something else, or is not read"
        )
    role.finish()
    return rounds


def _check_sums(plan: plan_pb2.WaferPlan, sums: Mapping[int, TensorInfo], sent: Collection[int]) -> None:
    require(len(sums) == len(plan.joined) and 0 not in sums, "a sum is named twice, or has no number")
    require(not sums or plan.micro_batches > 1, "one micro-batch alone is added up")
    require(sums.keys().isdisjoint(sent), "a sum that is to be rounded is sent as it is")
    require(all(j.reduction == plan_pb2.REDUCTION_SUM for j in plan.joined), "gradients are joined, and not added")


def _check_rounding(
    plan: plan_pb2.WaferPlan, role: Role, run: plan_pb2.Run, sums: Mapping[int, TensorInfo], made: Counter[int]
) -> None:
    """Checks a Run that rounds sums: all micro-batches must have added their parts."""
    require(not run.commits and run.micro_batch == 0, "sums are rounded once, and belong to no micro-batch")
    for value in run.inputs:
        require(made[value] == plan.micro_batches, f"value {value} is rounded before all its parts are there")
        require(role.type_of(value) == sums[value], f"value {value} is not of the type that its sum has")
    role.run(run)
    role.drop(run)


def _check_segment_run(plan: plan_pb2.WaferPlan, before: plan_pb2.Run | None, run: plan_pb2.Run) -> None:
    """Checks that a segment is run for the right number of micro-batches, in order, before another is run."""
    require(run.micro_batch < plan.micro_batches, "the wafer has no such micro-batch")
    follows = before is not None and run.micro_batch == before.micro_batch + 1
    if follows and before is not None and (before.kernel, before.layer) == (run.kernel, run.layer):
        return
    whole = before is None or (before.micro_batch + 1) % plan.micro_batches_at_once == 0
    require(whole and run.micro_batch % plan.micro_batches_at_once == 0, "micro-batches are not run in their order")


def _check_shard(plan: plan_pb2.MemoryXPlan, role: Role) -> None:
    states = {slot.value: from_proto(slot.type) for slot in plan.states}
    require(0 not in states and len(states) == len(plan.states), f"{role.name} has a state's number twice, or none")
    role.values.update(states)

    def check_commit(state: int, type: TensorInfo) -> None:
        require(states.get(state) == type, f"{role.name} commits to {state}, which is no state of that type")

    for instruction, times in with_times(plan.instructions, plan.loop):
        role.times = times
        if times > 1:
            _check_looped(role, instruction)
        match instruction.WhichOneof("kind"):
            case "receive":
                _check_receive(role, instruction.receive)
            case "run":
                run = instruction.run
                require(run.micro_batch == 0, f"{role.name} divides its work into micro-batches")
                outputs = role.run(run).outputs
                require(states.keys().isdisjoint(run.outputs), f"{role.name} makes a value that is a state's")
                require(states.keys().isdisjoint(run.drops), f"{role.name} drops a state")
                if run.commits:
                    require(len(run.commits) == len(outputs), f"{role.name} does not say where each output goes")
                taken = [state for state in run.commits if state]
                require(len(set(taken)) == len(taken), f"{role.name} commits twice to a state")
                for state, type in zip(run.commits, outputs, strict=False):
                    if state:
                        check_commit(state, type)
                role.used.update(value for value, state in zip(run.outputs, run.commits, strict=False) if state)
                role.drop(run)
            case "send":
                role.send(instruction.send.group)
            case "commit":
                commit = instruction.commit
                check_commit(commit.state, role.type_of(commit.value))
                role.used.add(commit.value)
            case kind:
                raise PlanError(f"a shard has no instruction {kind}")
    require(role.made <= role.used, f"{role.name} makes what nothing uses")
    role.finish()


def _check_looped(role: Role, instruction: plan_pb2.Instruction) -> None:
    """Checks that an instruction can be repeated: that it sends weights, or adds gradients."""
    kind = instruction.WhichOneof("kind")
    is_load = kind == "send" and role.group(instruction.send.group).kind == plan_pb2.GROUP_KIND_WEIGHTS
    is_addition = kind == "receive" and instruction.receive.adds_to
    require(is_load or is_addition, f"the loop of {role.name} does more than to send weights and to add gradients")


def _check_receive(role: Role, receive: plan_pb2.Receive) -> None:
    if not receive.adds_to:
        role.receive(receive.group)
        return
    require(role.received[receive.adds_to] == 1, f"{role.name} adds to a group that it has not received once")
    totals = role.group(receive.adds_to).members
    parts = role.receive(receive.group).members
    require(not receive.keep and receive.group != receive.adds_to, f"{role.name} keeps what it adds to another group")
    alike = [part.type for part in parts] == [total.type for total in totals]
    require(alike, f"{role.name} adds a group to one with other members")
    role.used.update(part.value for part in parts)
    for part in parts:
        del role.values[part.value]  # it is in the sum, and cannot be read alone


def _check_rounds(plan: plan_pb2.WaferPlan, part: plan_pb2.MemoryXPlan, role: Role, rounds: Mapping[int, int]) -> None:
    """Checks that a shard adds the parts of all rounds. rounds: the values that one round makes, with its number."""
    groups = {group.id: group for group in part.groups}
    added: dict[int, list[int]] = {}
    require(part.loop.times in (0, plan.loop.times), f"{role.name} repeats its loop less or more often than the wafers")
    for instruction, times in with_times(part.instructions, part.loop):
        if not instruction.HasField("receive"):
            continue
        receive = instruction.receive
        values = [member.value for member in groups[receive.group].members]
        numbers = {rounds.get(value) for value in values}
        # A shard may receive a group whose values it does not read, to know that the wafers have sent it.
        if receive.adds_to or (numbers != {None} and not role.used.isdisjoint(values)):
            number = numbers.pop()
            if number is None or numbers:
                raise PlanError(f"{role.name} adds values of one round to those of another")
            added.setdefault(receive.adds_to or receive.group, []).extend(range(number, number + times))
    num_rounds = plan.micro_batches // plan.micro_batches_at_once
    complete = all(numbers == list(range(num_rounds)) for numbers in added.values())
    require(complete, f"{role.name} lacks the parts of some rounds")


def _check_arena(plan: plan_pb2.Plan) -> None:
    """Checks that no gradient is written where another may still be read: the arena follows from the programs."""
    require(is_sent_where_it_is_written(plan.wafer), "gradients of other rounds lie among those of the wafer's loop")
    arenas = [lay_out_arena(plan.wafer, is_small=is_small) for is_small in (False, True)]
    require(plan.wafer.arena in arenas, "the wafer's arena is neither of those that its program allows")
    for stated in (plan.swarmx.arena, *(part.arena for part in plan.memoryx)):
        require(stated == plan.wafer.arena, "gradients do not lie where the wafer's program lets them lie")
    for part in plan.memoryx:
        kept = {i.receive.group for i in part.instructions if i.receive.keep}
        require(kept == late_gradients(part), f"shard {part.shard} keeps other gradients than those that it reads late")


def _check_link_memory(plan: plan_pb2.Plan) -> None:
    """Checks the link memory, which follows from programs and groups."""
    expected = plan_pb2.Plan()
    expected.CopyFrom(plan)
    set_link_bytes(expected)
    require(expected == plan, "links between hosts may hold more or less than the plan says")


def _check_states(plan: plan_pb2.Plan) -> None:
    """Checks that a state has one number, one type, and one shard unless it is replicated."""
    known: dict[str, plan_pb2.StateSlot] = {}
    for slot in (slot for part in plan.memoryx for slot in part.states):
        require(slot.name, "a state has no name")
        other = known.setdefault(slot.name, slot)
        require(other is slot or (other == slot and slot.replicated), f"{slot.name!r} is on two shards")
    numbers = {slot.value for slot in known.values()}
    require(len(numbers) == len(known), "two states have one number")
    require(all(prod(s.type.shape) == 1 for s in known.values() if s.replicated), "a state of several shards is large")
    kept = {slot.name for slot in plan.memoryx[0].states}
    require(all(s.name in kept for s in known.values() if s.replicated), "shard 0 lacks a state of several shards")


def _check_gathered(plan: plan_pb2.Plan) -> None:
    sums = {
        member.value
        for group in plan.wafer.groups
        if group.reduction == plan_pb2.REDUCTION_SUM
        for member in group.members
    }
    require(
        all(gathered.value in sums for gathered in plan.gathered), "a value is gathered that the wafers do not send"
    )


def _check_outputs(plan: plan_pb2.Plan, num_parts: int) -> None:
    groups = {group.id: group for group in plan.coordinator.groups}
    listed = {
        group.id
        for groups_of in (plan.wafer.groups, plan.pipeline.groups, *(part.groups for part in plan.memoryx))
        for group in groups_of
        if group.to_coordinator or group.kind == plan_pb2.GROUP_KIND_OUTPUT
    }
    require(set(groups) == listed and len(groups) == len(plan.coordinator.groups), "the coordinator's groups differ")
    names = [output.name for output in plan.coordinator.outputs]
    require(len(set(names)) == len(names) and "" not in names, "outputs have one name, or none")
    for output in plan.coordinator.outputs:
        what = f"output {output.name!r}"
        require(output.group in groups, f"{what} comes in no group")
        group = groups[output.group]
        member = next((member for member in group.members if member.value == output.value), None)
        if member is None:
            raise PlanError(f"{what} is not in its group")
        gathered = group.reduction == plan_pb2.REDUCTION_GATHER
        require(
            output.gathered == gathered, f"{what} is put together from what is not in parts, or the other way round"
        )
        require(member.type.element_type == output.type.element_type, f"{what} has another element type than is sent")
        if not gathered:
            require(member.type == output.type, f"{what} has another shape than is sent")
            require((output.dim, output.outer) == (0, 1), f"{what} is whole, and is put together along a dimension")
            continue
        shape = list(output.type.shape)
        require(output.dim < len(shape), f"{what} has no dimension {output.dim}")
        size = shape[output.dim]
        require(output.outer and size % (output.outer * num_parts) == 0, f"{what} does not divide into its parts")
        shape[output.dim] = size // num_parts
        require(shape == list(member.type.shape), f"{what} is not what its parts make")
        require(tensor_bytes(output.type) == tensor_bytes(member.type) * num_parts, f"{what} is not its parts")
        require(member == group.members[0], f"{what} does not begin with its first part")
