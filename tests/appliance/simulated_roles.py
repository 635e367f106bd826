"""The roles of a simulated plan, each a generator that yields while it waits."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

import torch
from simulated_links import Frame, Held, Wires, arena_places, check_type, empty

from waferbox.cirh.execution.kernel import Kernel, clone_views
from waferbox.cirh.text.parser import parse_module
from waferbox.links.elements import tensor_bytes, torch_dtype
from waferbox.links.shared_memory import SharedMemory
from waferbox.runtime.arena import ArenaCounts, direct_values
from waferbox.runtime.loops import in_order
from waferbox.runtime.schedule import WEIGHTS_CREDIT_BATCH, WEIGHTS_WINDOW, is_for_coordinator_only
from waferbox.runtime.swarmx_trees import tree_of
from waferbox.states.kernels import StateKernel
from wsc.v1 import plan_pb2


class Role:
    """The common part of wafers and shards: values by number, and one buffer to send each group from."""

    def __init__(
        self,
        name: str,
        plan: plan_pb2.WaferPlan | plan_pb2.MemoryXPlan,
        wires: Wires,
        num_wafers: int,
        trees: Sequence[int],
    ) -> None:
        self.name, self.plan, self.wires, self.num_wafers, self.trees = name, plan, wires, num_wafers, trees
        self.groups = {group.id: group for group in plan.groups}
        self.values: dict[int, Held] = {}
        sent = [i.send.group for i in plan.instructions if i.WhichOneof("kind") == "send"]
        self.places: dict[int, dict[int, torch.Tensor]] = {
            group: {member.value: empty(member.type) for member in self.groups[group].members} for group in sent
        }
        self.counts = ArenaCounts(plan.arena)
        produced = direct = {value for i in plan.instructions for value in i.run.outputs}
        if isinstance(plan, plan_pb2.WaferPlan):
            self.places |= arena_places(plan.arena, self.groups)
            direct = direct_values(plan) if self.counts.credited else produced
        self.place_of: dict[int, torch.Tensor] = {}
        self.group_of: dict[int, int] = {}
        for group in dict.fromkeys(sent):
            for value, tensor in self.places[group].items():
                if value in (direct if group in self.counts.offsets else produced) and value not in self.place_of:
                    self.place_of[value] = tensor
                    self.group_of[value] = group

    def root(self, group: plan_pb2.Group) -> str:
        """The root of the tree that carries a group, or the single wafer."""
        return f"swarmx{tree_of(group, self.trees)}" if self.num_wafers > 1 else "wafer0"

    def read(self, value: int) -> torch.Tensor:
        held = self.values[value]
        if held.frame is not None:
            held.frame.check(self.name, [held.tensor])
        return held.tensor

    def accept(self, frame: Frame) -> None:
        group = self.groups[frame.group]
        check_type(group, frame.tensors)
        for member, tensor in zip(group.members, frame.tensors, strict=True):
            self.values[member.value] = Held(tensor, frame)

    def complete(self, group: int) -> list[torch.Tensor]:
        """The tensors of a group, each in its place."""
        for value, place in self.places[group].items():
            tensor = self.read(value)
            if tensor is not place:
                place.copy_(tensor)
        return list(self.places[group].values())

    def drop(self, run: plan_pb2.Run) -> None:
        for value in run.drops:
            del self.values[value]


class Wafer(Role):
    """One wafer."""

    plan: plan_pb2.WaferPlan

    def __init__(
        self,
        index: int,
        plan: plan_pb2.WaferPlan,
        kernels: Mapping[int, Kernel],
        wires: Wires,
        batches: Sequence[list[torch.Tensor]],
        num_wafers: int,
        trees: Sequence[int],
    ):
        super().__init__(f"wafer{index}", plan, wires, num_wafers, trees)
        self.batches = batches
        # Who tells how many groups are released, with the first count of each.
        self.releasing = {self.root(group): 0 for group in plan.groups if group.id in self.counts.offsets}
        if num_wafers == 1:
            self.releasing = {f"shard{i}": count for i, count in self.counts.first_counts(plan.groups).items()}
        self.numbers = [torch.tensor([index * plan.micro_batches + k]) for k in range(plan.micro_batches)]
        self.reductions = {
            member.value: group.reduction
            for group in plan.groups
            if group.kind == plan_pb2.GROUP_KIND_REDUCTION
            for member in group.members
        }
        self.kernels = kernels
        self.sums = {joined.value: joined.reduction for joined in plan.joined}
        self.looped = set(plan.looped_parts)
        self.made_before: list[frozenset[int]] = []  # by instruction
        made: frozenset[int] = frozenset()
        for instruction in plan.instructions:
            self.made_before.append(made)
            made |= frozenset(instruction.run.outputs)

    def run(self) -> Iterator[None]:
        for step, batch in enumerate(self.batches, 1):
            self.values.clear()
            self.values.update(zip(self.plan.number_values, map(Held, self.numbers), strict=False))
            for (position, instruction), repetition in in_order([*enumerate(self.plan.instructions)], self.plan.loop):
                match instruction.WhichOneof("kind"):
                    case "receive":
                        group = self.groups[instruction.receive.group]
                        if group.kind == plan_pb2.GROUP_KIND_BATCH:
                            self.accept(Frame.of(group, step, batch, as_bytes=True))
                            continue
                        if self.num_wafers == 1 and group.kind == plan_pb2.GROUP_KIND_REDUCTION:
                            continue  # it is what the wafer has made
                        source = self.root(group) if self.num_wafers > 1 else f"shard{group.source_shard}"
                        while (frame := self.wires.take(source, self.name, group.id, step)) is None:
                            yield
                        self.accept(frame)
                        if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                            self.wires.taken[group.source_shard, self.name] += 1
                    case "run":
                        self.wires.moves += 1
                        yield  # The other roles run between any two kernels.
                        run, made = self.in_repetition(instruction.run, repetition), self.made_before[position]
                        written = [self.group_of[value] for value in run.outputs if value in self.group_of]
                        yield from self.wait_for_places(written, step, repetition)
                        places = [None if value in made else self.place_of.get(value) for value in run.outputs]
                        inputs = [self.read(value) for value in run.inputs]
                        kernel = self.kernels[run.kernel]
                        if run.overwritten:
                            kernel = kernel.writing_over(run.overwritten)
                        results = kernel(list(inputs), places)
                        for i, value in enumerate(run.outputs):
                            if value in made and value in self.sums:
                                before = self.values[value].tensor
                                results[i] = before.copy_(reduced(self.sums[value], [before, results[i]]))
                            elif value in self.sums:
                                results[i] = results[i].clone()
                            elif value in made and value in self.reductions:  # by micro-batches before
                                home = self.place_of[value]
                                results[i] = home.copy_(reduced(self.reductions[value], [home, results[i]]))
                        if self.counts.credited:
                            shown = [t for v, t in zip(run.inputs, inputs, strict=True) if self.lies_in_arena(v)]
                            shown += [t for v, t in zip(run.outputs, results, strict=True) if self.lies_in_arena(v)]
                            clone_views(results, places, shown)
                        self.values |= {v: Held(tensor) for v, tensor in zip(run.outputs, results, strict=True)}
                        self.drop(run)
                    case "send":
                        group = self.groups[instruction.send.group]
                        yield from self.wait_for_places([group.id], step, repetition)
                        tensors = self.complete(group.id)
                        check_type(group, tensors)
                        self.send(group, step, tensors)
                    case kind:
                        raise AssertionError(kind)

    def send(self, group: plan_pb2.Group, step: int, tensors: Sequence[torch.Tensor]) -> None:
        if self.num_wafers > 1:
            frame = Frame.of(group, step, tensors, as_bytes=is_for_coordinator_only(group))
            self.wires.send(self.name, self.root(group), frame)
            return
        for shard in group.shards:
            self.wires.send(self.name, f"shard{shard}", Frame.of(group, step, tensors, as_bytes=False))
        if group.to_coordinator:
            if group.reduction == plan_pb2.REDUCTION_GATHER:
                tensors = [torch.cat([tensor.reshape(-1) for tensor in tensors])]
            self.wires.send(self.name, "coordinator", Frame.of(group, step, tensors, as_bytes=True))

    def lies_in_arena(self, value: int) -> bool:
        return self.group_of.get(value) in self.counts.offsets

    def in_repetition(self, run: plan_pb2.Run, repetition: int) -> plan_pb2.Run:
        """A run with the numbers of a repetition of the loop."""
        step = repetition * self.plan.micro_batches_at_once
        shifted = plan_pb2.Run(kernel=run.kernel, overwritten=run.overwritten)
        for before, after in ((run.inputs, shifted.inputs), (run.outputs, shifted.outputs), (run.drops, shifted.drops)):
            after.extend(value + step if value in self.looped else value for value in before)
        return shifted

    def wait_for_places(self, groups: Sequence[int], step: int, repetition: int) -> Iterator[None]:
        """Waits until the groups that lie in the places of these groups are released."""
        for group in groups:
            awaited = self.counts.awaited(group)
            count = None if awaited is None else self.counts.count(awaited, step, repetition)
            while count is not None and any(
                max(first, self.wires.released[name]) < count for name, first in self.releasing.items()
            ):
                yield


class ShardMemory:
    """The buffers of a shard's states, and its kernels: made once for all runs, as they take longer than a step."""

    def __init__(self, plan: plan_pb2.MemoryXPlan) -> None:
        nbytes = sum(-(-tensor_bytes(slot.type) // 64) * 64 for slot in plan.states)
        memory = SharedMemory.create(max(nbytes, 64))
        self.states: dict[int, torch.Tensor] = {}
        offset = 0
        for slot in plan.states:
            dtype, shape = torch_dtype(slot.type.element_type), tuple(slot.type.shape)
            self.states[slot.value] = memory.tensor(dtype, shape, offset)
            offset += -(-tensor_bytes(slot.type) // 64) * 64
        self.kernels = {k.id: StateKernel(parse_module(k.cirh), None, memory) for k in plan.kernels}
        memory.close()  # the memory goes with its last view


class Shard(Role):
    """One MemoryX shard."""

    plan: plan_pb2.MemoryXPlan

    def __init__(
        self,
        plan: plan_pb2.MemoryXPlan,
        memory: ShardMemory,
        wires: Wires,
        num_wafers: int,
        states: Mapping[str, torch.Tensor],
        trees: Sequence[int],
    ):
        super().__init__(f"shard{plan.shard}", plan, wires, num_wafers, trees)
        self.names = {slot.name: slot.value for slot in plan.states}
        self.states = memory.states
        for name, value in self.names.items():
            self.states[value].copy_(states[name])
        self.kernels = memory.kernels
        for group, places in self.places.items():
            if self.groups[group].kind == plan_pb2.GROUP_KIND_WEIGHTS:
                places |= {value: self.states[value] for value in places if value in self.states}
        runs = [i.run for i in plan.instructions if i.WhichOneof("kind") == "run"]
        committed = {v for run in runs for v, state in zip(run.outputs, run.commits, strict=False) if state}
        self.place_of = {v: t for v, t in self.place_of.items() if v not in committed and v not in self.states}
        received = [i.receive.group for i in plan.instructions if i.WhichOneof("kind") == "receive"]
        self.from_arena = [group for group in received if group in self.counts.offsets]
        self.released_counts = self.counts.released_counts(self.from_arena)
        self.borrowed: tuple[int, int] | None = None  # the group, and its repetition
        self.calls = [
            self.kernels[run.kernel].bind(
                [self.states[state] if state else None for state in run.commits] or [None] * len(run.outputs),
                [self.place_of.get(value) for value in run.outputs],
            )
            for run in runs
        ]

    def run(self, num_steps: int) -> Iterator[None]:
        for step in range(1, num_steps + 1):
            self.values = {value: Held(tensor) for value, tensor in self.states.items()}
            calls = iter(self.calls)
            for instruction, repetition in in_order(self.plan.instructions, self.plan.loop):
                match instruction.WhichOneof("kind"):
                    case "receive":
                        self.release(step)
                        group = self.groups[instruction.receive.group]
                        exchanged = group.kind == plan_pb2.GROUP_KIND_EXCHANGE
                        source = f"shard{group.source_shard}" if exchanged else self.root(group)
                        while (frame := self.wires.take(source, self.name, group.id, step)) is None:
                            yield
                        if instruction.receive.keep:
                            frame = dataclasses.replace(frame, tensors=[tensor.clone() for tensor in frame.tensors])
                        if instruction.receive.adds_to:
                            self.add(frame, self.groups[instruction.receive.adds_to])
                        else:
                            self.accept(frame)
                        self.borrowed = (group.id, repetition) if group.id in self.from_arena else None
                    case "run":
                        self.wires.moves += 1
                        yield
                        run = instruction.run
                        inputs = [self.read(value) for value in run.inputs]
                        results = list(next(calls)(inputs))
                        if self.counts.credited:
                            places = [self.place_of.get(value) for value in run.outputs]
                            homes = [self.states[s] if s else p for s, p in zip_longest(run.commits, places)]
                            if self.kernels[run.kernel].may_show_inputs and self.borrowed is not None:
                                members = {member.value for member in self.groups[self.borrowed[0]].members}
                                shown = [t for v, t in zip(run.inputs, inputs, strict=True) if v in members]
                                clone_views(results, homes, shown)
                        self.values |= {v: Held(tensor) for v, tensor in zip(run.outputs, results, strict=True)}
                        self.drop(run)
                    case "commit":
                        self.states[instruction.commit.state].copy_(self.read(instruction.commit.value))
                    case "send":
                        self.release(step)
                        yield from self.send(self.groups[instruction.send.group], step)
            self.release(step)

    def add(self, frame: Frame, first: plan_pb2.Group) -> None:
        """Adds the gradients of a later round to those of the first."""
        check_type(self.groups[frame.group], frame.tensors)
        frame.check(self.name, frame.tensors)
        for member, tensor in zip(first.members, frame.tensors, strict=True):
            self.values[member.value] = Held(self.read(member.value) + tensor)

    def release(self, step: int) -> None:
        """Releases the gradients that were received last."""
        if self.borrowed is not None:
            group, repetition = self.borrowed
            told = self.released_counts[group][repetition]
            self.borrowed = None
            if told:
                self.wires.released[self.name] = self.counts.count(told, step)
                self.wires.moves += 1

    def send(self, group: plan_pb2.Group, step: int) -> Iterator[None]:
        tensors = self.complete(group.id)
        check_type(group, tensors)
        match group.kind:
            case plan_pb2.GROUP_KIND_WEIGHTS:
                while self.wires.sent[self.plan.shard] - self.granted() >= WEIGHTS_WINDOW:
                    yield
                self.wires.sent[self.plan.shard] += 1
                self.wires.send(self.name, self.root(group), Frame.of(group, step, tensors, as_bytes=False))
            case plan_pb2.GROUP_KIND_EXCHANGE:
                for shard in group.shards:
                    assert shard != self.plan.shard
                    self.wires.send(self.name, f"shard{shard}", Frame.of(group, step, tensors, as_bytes=True))
            case plan_pb2.GROUP_KIND_OUTPUT:
                self.wires.send(self.name, "coordinator", Frame.of(group, step, tensors, as_bytes=True))
            case kind:
                raise AssertionError(kind)

    def granted(self) -> int:
        taken = [self.wires.taken[self.plan.shard, f"wafer{i}"] for i in range(self.num_wafers)]
        return min(count // WEIGHTS_CREDIT_BATCH * WEIGHTS_CREDIT_BATCH for count in taken)


class SwarmX:
    """The one node of a SwarmX tree. Handles frames in any order. Sums lie in one buffer per group, or in the arena."""

    def __init__(
        self, tree: int, plan: plan_pb2.SwarmXPlan, num_wafers: int, num_shards: int, wires: Wires, trees: Sequence[int]
    ) -> None:
        self.name = f"swarmx{tree}"
        self.groups = {group.id: group for group in plan.groups if tree_of(group, trees) == tree}
        self.wafers = [f"wafer{i}" for i in range(num_wafers)]
        self.shards = [f"shard{i}" for i in range(num_shards) if not trees or not tree or trees[i] == tree]
        self.wires = wires
        self.counts = ArenaCounts(plan.arena)
        places = {place.group: place for place in plan.arena.places if place.group in self.groups}
        own = plan_pb2.SendArena(nbytes=plan.arena.nbytes, places=places.values(), credited=plan.arena.credited)
        self.sums = {group: list(tensors.values()) for group, tensors in arena_places(own, self.groups).items()}
        self.first = {f"shard{i}": c for i, c in self.counts.first_counts(self.groups.values()).items()}
        self.complete: deque[tuple[plan_pb2.Group, list[Frame]]] = deque()
        self.order = self.counts.order_of(self.groups)
        self.joined = 0  # groups of the arena
        self.times = dict(zip((group.id for group in plan.groups), plan.times, strict=True))
        self.taken: dict[tuple[int, int], int] = defaultdict(int)  # by group and step

    def run(self) -> Iterator[None]:
        waiting: dict[tuple[int, int], dict[str, deque[Frame]]] = defaultdict(lambda: defaultdict(deque))
        while True:
            for shard in self.shards:
                while queue := self.wires.queues[shard, self.name]:
                    frame = queue.popleft()
                    for wafer in self.wafers:
                        self.wires.send(self.name, wafer, frame)
            for wafer in self.wafers:
                while queue := self.wires.queues[wafer, self.name]:
                    frame = queue.popleft()
                    parts = waiting[frame.group, frame.step]
                    parts[wafer].append(frame)
                    if all(parts[name] for name in self.wafers):
                        group = self.groups[frame.group]
                        frames = [parts[name].popleft() for name in self.wafers]
                        self.taken[group.id, frame.step] += 1
                        assert self.taken[group.id, frame.step] <= self.times[group.id], (
                            "it is sent too often in a step"
                        )
                        if group.id in self.counts.offsets:
                            self.complete.append((group, frames))
                        else:
                            self.join(group, frames)
            self.join_complete()
            yield

    def join_complete(self) -> None:
        """Joins gradients whose places are released."""
        released = min((max(first, self.wires.released[s]) for s, first in self.first.items()), default=0)
        while self.complete:
            group, frames = self.complete[0]
            window = self.counts.window(group.id)
            number = self.order.number(self.joined)
            if window is not None and number - window > released:
                break
            self.complete.popleft()
            repetitions = range(self.times[group.id])
            assert number in [self.counts.number(group.id, frames[0].step, number) for number in repetitions]
            self.join(group, frames)
            self.joined += 1
        reached = self.order.number(self.joined)
        for count in self.counts.awaited_between(self.wires.released[self.name], reached):
            self.wires.released[self.name] = count
            self.wires.moves += 1

    def join(self, group: plan_pb2.Group, parts: list[Frame]) -> None:
        step = parts[0].step
        for part in parts:
            part.check(self.name, part.tensors)
        if group.reduction == plan_pb2.REDUCTION_GATHER:
            joined = [torch.cat([tensor.reshape(-1) for part in parts for tensor in part.tensors])]
        else:
            assert len({member.type.element_type for member in group.members}) == 1
            buffers = self.sums.setdefault(group.id, [torch.empty_like(t) for t in parts[0].tensors])
            for place, *tensors in zip(buffers, *(part.tensors for part in parts), strict=True):
                place.copy_(reduced(group.reduction, tensors))
            joined = buffers
        bytes_only = is_for_coordinator_only(group)
        for shard in group.shards:
            self.wires.send(self.name, f"shard{shard}", Frame.of(group, step, joined, as_bytes=bytes_only))
        if group.to_wafers:
            for wafer in self.wafers:
                self.wires.send(self.name, wafer, Frame.of(group, step, joined, as_bytes=bytes_only))
        if group.to_coordinator:
            self.wires.send(self.name, "coordinator", Frame.of(group, step, joined, as_bytes=True))


def reduced(reduction: "plan_pb2.Reduction.ValueType", tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the reduction of several wafers' tensors on SwarmX, or of several micro-batches' on a wafer."""
    dtype = tensors[0].dtype
    total = tensors[0].float() if dtype in (torch.float16, torch.bfloat16) else tensors[0]
    for tensor in tensors[1:]:
        match reduction:
            case plan_pb2.REDUCTION_SUM:
                total = total + tensor
            case plan_pb2.REDUCTION_MAX:
                total = torch.maximum(total, tensor)
            case plan_pb2.REDUCTION_MIN:
                total = torch.minimum(total, tensor)
            case kind:
                raise AssertionError(kind)
    return total.to(dtype)
