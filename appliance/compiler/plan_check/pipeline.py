"""Checks that the pipeline of a plan is consistent, at any speed of its regions."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations, pairwise
from typing import Final

import torch

from appliance.compiler.core.target import KernelLibrary
from appliance.compiler.pipelined.order import At, Order, RegionDeadlock, find_order, instructions
from appliance.compiler.plan_check.roles import PlanError, Signature, check_members, require, signature_of
from appliance.drawing.floor_plan import HEIGHT, WIDTH
from waferbox.cirh.dialect.types import TensorInfo, from_proto
from waferbox.runtime.schedule import makes_and_reads
from wsc.v1 import plan_pb2

_NUMBER: Final = TensorInfo((1,), torch.int64)
_JOINS: Final = (plan_pb2.REDUCTION_SUM, plan_pb2.REDUCTION_MAX, plan_pb2.REDUCTION_MIN)


def check_pipeline(plan: plan_pb2.Plan) -> None:
    """Raises PlanError unless the plan's pipeline is consistent."""
    _check_sizes(plan)
    _check_regions(plan.pipeline)
    _check_groups(plan)
    try:
        order = find_order(plan.pipeline)
    except RegionDeadlock as error:
        raise PlanError(str(error)) from error
    _Values(plan.pipeline, order).check()


def _check_sizes(plan: plan_pb2.Plan) -> None:
    pipeline, worker = plan.pipeline, plan.worker
    require(plan.num_csx == 1, "a pipeline is for one wafer")
    streamed = plan.wafer.ByteSize() or plan.memoryx or plan.swarmx.ByteSize()
    require(not streamed, "a pipeline has weights streamed to it")
    rows = (worker.global_rows, worker.local_rows)
    require(rows == (plan.batch_rows, plan.batch_rows), "workers and plan differ in the rows of a batch")
    micro_batches = pipeline.micro_batches
    require(micro_batches >= 1 and plan.batch_rows % micro_batches == 0, "rows are not divided into micro-batches")
    require(worker.micro_batches == micro_batches, "workers and wafer differ in the micro-batches")
    replicas = pipeline.num_replicas
    divided = replicas >= 1 and micro_batches % replicas == 0 and len(pipeline.regions) % replicas == 0
    require(divided, "regions or micro-batches are not divided over the replicas")
    require(pipeline.memory_bytes > 0, "the wafer has no memory")
    KernelLibrary.from_proto(pipeline.kernel_library)


def _check_regions(plan: plan_pb2.PipelinePlan) -> None:
    require(plan.regions, "there is no region")
    for region in plan.regions:
        inside = region.width and region.height
        inside = inside and region.x + region.width <= WIDTH and region.y + region.height <= HEIGHT
        require(region.name and inside, f"region {region.name!r} has no name, or no place on the wafer")
    for one, other in combinations(plan.regions, 2):
        apart = one.x + one.width <= other.x or other.x + other.width <= one.x
        apart = apart or one.y + one.height <= other.y or other.y + other.height <= one.y
        require(apart, f"regions {one.name!r} and {other.name!r} overlap")


def _check_groups(plan: plan_pb2.Plan) -> None:
    pipeline = plan.pipeline
    numbers = [group.id for group in pipeline.groups]
    require(0 not in numbers and len(set(numbers)) == len(numbers), "a group has no number, or another's")
    received = Counter(i.receive.group for _, i in instructions(pipeline) if i.HasField("receive"))
    sent = Counter(i.send.group for _, i in instructions(pipeline) if i.HasField("send"))
    for group in pipeline.groups:
        what = f"group {group.id}"
        is_batch = group.kind == plan_pb2.GROUP_KIND_BATCH
        require(is_batch or group.kind == plan_pb2.GROUP_KIND_OUTPUT, f"{what} is neither the batch nor outputs")
        require((received[group.id], sent[group.id]) == (is_batch, not is_batch), f"{what} does not travel once")
        require(not is_batch or group == plan.worker.batch, f"{what} is another batch than that of the workers")
        whole = group.reduction == plan_pb2.REDUCTION_UNSPECIFIED
        gathered = not is_batch and group.reduction == plan_pb2.REDUCTION_GATHER
        require(whole or gathered, f"{what} is reduced, and should not be")
        addressed = group.shards or group.to_wafers or group.to_coordinator or group.source_shard
        require(not addressed, f"{what} goes where its kind does not")
        check_members(group, what, 1, pipeline.micro_batches)
    outputs = [group for group in pipeline.groups if group.kind == plan_pb2.GROUP_KIND_OUTPUT]
    require(list(plan.coordinator.groups) == outputs, "the coordinator's groups are others than the wafer sends")
    require(sum(group == plan.worker.batch for group in pipeline.groups) == 1, "there is no batch")
    require({*received, *sent} == set(numbers), "a group travels that is not listed")


class _Values:
    """The values that the regions make, read, drop and overwrite."""

    def __init__(self, plan: plan_pb2.PipelinePlan, order: Order) -> None:
        self._plan = plan
        self._order = order
        self._groups = {group.id: group for group in plan.groups}
        self._kernels = {kernel.id: signature_of(kernel.cirh) for kernel in plan.kernels}
        self._states = {slot.value: from_proto(slot.type) for slot in plan.states}
        self._joined = {value.value: from_proto(value.type) for value in plan.joined}
        self._types: dict[int, TensorInfo] = {}
        self._made: dict[int, list[int]] = defaultdict(list)  # by value: the micro-batches that make it
        self._readers: dict[int, list[At]] = defaultdict(list)
        self._kept: set[int] = set()  # values that must never be dropped

    def check(self) -> None:
        plan = self._plan
        require(len(self._kernels) == len(plan.kernels), "a kernel has another's number")
        names = {slot.name for slot in plan.states}
        distinct = len(names) == len(self._states) == len(plan.states) and "" not in names and 0 not in self._states
        require(distinct, "states are not distinct")
        numbers = set(plan.number_values)
        require(len(plan.number_values) in (0, plan.micro_batches), "not every part of the batch has a number")
        require(0 not in numbers and len(numbers) == len(plan.number_values), "the numbers of parts are not distinct")
        require(numbers.isdisjoint(self._states), "a part's number is a state")
        require(len(self._joined) == len(plan.joined), "a value is joined twice")
        require(all(value.reduction in _JOINS for value in plan.joined), "a value is joined in an unknown way")
        self._types.update({**self._states, **dict.fromkeys(numbers, _NUMBER)})
        self._kept.update({*self._states, *numbers})
        for at, instruction in instructions(plan):
            self._follow(at, instruction)
        self._check_made(numbers)
        self._check_types()
        self._check_drops()
        self._check_commits()
        runs = {instruction.run.kernel for _, instruction in instructions(plan) if instruction.HasField("run")}
        require(runs == set(self._kernels), "there are kernels that are not run")

    def _follow(self, at: At, instruction: plan_pb2.Instruction) -> None:
        kind = instruction.WhichOneof("kind")
        makes, reads = makes_and_reads(instruction, self._groups)
        for value in reads:
            self._readers[value].append(at)
        if kind == "run":
            self._follow_run(instruction.run)
            return
        require(kind in ("receive", "send", "commit"), f"a region has no instruction {kind}")
        require(not instruction.receive.keep, "a region keeps what it receives until it is dropped")
        require(not instruction.receive.adds_to, "a region adds what it receives")
        for value in makes:
            self._made[value].append(0)
        self._kept.update(reads)
        group = instruction.receive.group
        for member in self._groups[group].members if kind == "receive" else ():
            self._types[member.value] = from_proto(member.type)

    def _follow_run(self, run: plan_pb2.Run) -> None:
        require(run.micro_batch < self._plan.micro_batches, "the wafer has no such micro-batch")
        outputs = self._signature(run).outputs
        require(len(outputs) == len(run.outputs), f"kernel {run.kernel} has another number of results")
        for value, type in zip(run.outputs, outputs, strict=True):
            known = self._joined.get(value, self._types.get(value) if value in self._made else type)
            require(known == type, f"value {value} is made with another type than it has")
            self._made[value].append(run.micro_batch)
            self._types[value] = type

    def _signature(self, run: plan_pb2.Run) -> Signature:
        require(run.kernel in self._kernels, f"there is no kernel {run.kernel}")
        return self._kernels[run.kernel]

    def _check_made(self, numbers: set[int]) -> None:
        """Checks that each value is made once, a joined one by each micro-batch, and that each is used."""
        everyone = list(range(self._plan.micro_batches))
        for value, made in self._made.items():
            require(value and value not in self._states and value not in numbers, f"value {value} is something else")
            if value in self._joined:
                require(sorted(made) == everyone, f"value {value} lacks parts, or has one twice")
            else:
                require(len(made) == 1, f"value {value} is made again")
        require(self._joined.keys() <= self._made.keys(), "a joined value is never made")
        received = {member.value for group in self._plan.groups for member in group.members}
        committed = {
            value for run in self._runs() for value, state in zip(run.outputs, run.commits, strict=False) if state
        }
        for value in self._made:
            used = value in self._readers or value in received or value in committed
            require(used, f"value {value} is never used")
        require(numbers <= self._readers.keys(), "a part's number is not read")

    def _check_types(self) -> None:
        for _, instruction in instructions(self._plan):
            if instruction.HasField("run"):
                run = instruction.run
                inputs = self._signature(run).inputs
                read = [self._types.get(value) for value in run.inputs]
                require(read == list(inputs), f"kernel {run.kernel} is given other tensors than it takes")
            elif instruction.HasField("send"):
                members = self._groups[instruction.send.group].members
                fits = all(self._types.get(member.value) == from_proto(member.type) for member in members)
                require(fits, f"group {instruction.send.group} has other types than its values")

    def _check_drops(self) -> None:
        """Checks that a dropped value is not read later, and not by another region."""
        dropped: set[int] = set()
        for (region, place), instruction in instructions(self._plan):
            for value in instruction.run.drops:
                readers = self._readers.get(value, [])
                require(value not in dropped and value not in self._kept, f"value {value} must not be dropped")
                last = readers and all(at[0] == region and at[1] <= place for at in readers)
                require(last, f"value {value} is dropped while a region reads it")
                dropped.add(value)

    def _check_commits(self) -> None:
        """Checks that a state is replaced by its own type, and that each reader certainly gets the intended value."""
        places: dict[int, list[tuple[At, int]]] = defaultdict(
            list
        )  # by state: where it is replaced, and by which value
        for at, value, state in self._commits():
            type = self._states.get(state)
            require(type is not None and self._types.get(value) == type, f"{state} is no state of the type of {value}")
            places[state].append((at, value))
        shown = self._views()
        for state, commits in places.items():
            readers = [reader for old in shown[state] for reader in self._readers[old]]
            if self._plan.asynchronous_updates:
                self._check_versions(state, commits, readers)
                continue
            require(len(commits) == 1, f"state {state} is replaced twice")
            for reader in readers:
                self._require_before(reader, commits[0][0], state)

    def _check_versions(self, state: int, commits: list[tuple[At, int]], readers: list[At]) -> None:
        """Checks a state with asynchronous updates.

        One region must replace it, and each read must certainly be before, or certainly after, each replacement.
        """
        order = self._order
        ordered = sorted(commits)
        require(len({region for (region, _), _ in ordered}) == 1, f"state {state} is replaced by several regions")
        once = len(ordered) == 1 and ordered[0][1] in self._joined
        each = once or len(ordered) == self._plan.micro_batches
        require(each, f"state {state} is not replaced by each micro-batch")
        for at, _ in ordered:
            for reader in readers:
                known = reader[0] == at[0] or order.is_before(reader, at) or order.is_before(at, reader)
                require(known, f"state {state} is replaced while a region may read it")
        for (_, value), (following, _) in pairwise(ordered):
            for reader in self._readers[value]:
                self._require_before(reader, following, state)

    def _require_before(self, reader: At, at: At, state: int) -> None:
        before = reader == at or self._order.is_before(reader, at)
        require(before, f"state {state} may be replaced before a region has read it")

    def _commits(self) -> Iterator[tuple[At, int, int]]:
        for at, instruction in instructions(self._plan):
            run, commit = instruction.run, instruction.commit
            if instruction.HasField("commit"):
                yield at, commit.value, commit.state
            if run.commits:
                require(len(run.commits) == len(run.outputs), "a Run does not say where each output goes")
                for value, state in zip(run.outputs, run.commits, strict=True):
                    if state:
                        yield at, value, state

    def _views(self) -> Mapping[int, set[int]]:
        """By state, the values that are views of it, and itself."""
        shown: dict[int, set[int]] = {state: {state} for state in self._states}
        root = {state: state for state in self._states}
        grown = True
        while grown:
            grown = False
            for run in self._runs():
                commits = list(run.commits) or [0] * len(run.outputs)
                for value, source, taken in zip(run.outputs, self._signature(run).views, commits, strict=False):
                    of = root.get(run.inputs[source]) if source is not None and not taken else None
                    if of is not None and value not in root and value not in self._joined:
                        root[value] = of
                        shown[of].add(value)
                        grown = True
        return shown

    def _runs(self) -> Iterator[plan_pb2.Run]:
        return (instruction.run for _, instruction in instructions(self._plan) if instruction.HasField("run"))
