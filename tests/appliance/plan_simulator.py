"""Runs a plan in one process, as the roles run it: each role has one thread, and all of them take turns.

Every role is a generator that yields when it cannot go on. Which role goes next is drawn from a seeded generator, and
a few orders are as unfair as they can be (the slowest wafer, the fastest shard), so that what only holds by luck fails.

What is checked, besides the results: each RECEIVE gets what a SEND sent, and nothing is left over; a role that cannot
go on always can when the others have (no deadlock, with the window of the weights as it is); nobody reads a buffer
that has been written again since it was sent. For the last, a frame of more than INLINE_BYTES refers to the sender's
tensors, and gradient groups lie in an arena as the plan has it, where one overwrites another.
"""

import dataclasses
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from xdsl.dialects.builtin import ModuleOp

from appliance.coordinator.execution.results import OutputReader
from cirh.execution.kernel import Kernel
from cirh.execution.views import clone_views
from cirh.text.parser import parse_module
from interconnect.links.elements import tensor_bytes, torch_dtype
from interconnect.links.frame import INLINE_BYTES
from interconnect.links.shared_memory import SharedMemory
from memoryx.kernels import StateKernel
from nodes.steps.arena import ArenaCounts, direct_values
from nodes.steps.schedule import WEIGHTS_CREDIT_LOT, WEIGHTS_WINDOW, is_for_coordinator_only
from swarmx.releases import first_counts
from wsc.v1 import plan_pb2


class Deadlock(AssertionError):
    """No role can go on."""


class Hazard(AssertionError):
    """A buffer was written while somebody had still to read it."""


@dataclass(slots=True)
class Frame:
    """A group's tensors of one step, in the order of its members."""

    group: int
    step: int
    tensors: list[torch.Tensor]
    sent: list[torch.Tensor]  # what they were then

    @classmethod
    def of(cls, group: plan_pb2.Group, step: int, tensors: Sequence[torch.Tensor], *, as_bytes: bool) -> "Frame":
        inline = as_bytes or group.nbytes <= INLINE_BYTES
        kept = [tensor.clone() for tensor in tensors] if inline else list(tensors)
        return cls(group.id, step, kept, [tensor.clone() for tensor in kept])

    def check(self, reader: str, read: Sequence[torch.Tensor]) -> None:
        """Tensors of the frame are read: they must be as they were sent. The others may have gone on."""
        for tensor, sent in zip(self.tensors, self.sent, strict=True):
            if any(tensor is one for one in read) and not torch.allclose(tensor, sent, rtol=0, atol=0, equal_nan=True):
                raise Hazard(f"{reader} reads group {self.group} of step {self.step}, which was written again")


@dataclass(slots=True)
class Held:
    """A value that a role has, with the frame that it came in."""

    tensor: torch.Tensor
    frame: Frame | None = None


@dataclass(slots=True)
class Wires:
    """Frames on their way: (sender, receiver) -> in order."""

    queues: dict[tuple[str, str], deque[Frame]] = field(default_factory=lambda: defaultdict(deque))
    taken: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))  # weights, (shard, wafer)
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # weights groups, by shard
    released: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # what shards, and SwarmX, last told
    moves: int = 0  # everything that any role did

    def send(self, sender: str, receiver: str, frame: Frame) -> None:
        self.moves += 1
        self.queues[sender, receiver].append(frame)

    def take(self, sender: str, receiver: str, group: int, step: int) -> Frame | None:
        queue = self.queues[sender, receiver]
        for index, frame in enumerate(queue):
            if (frame.group, frame.step) == (group, step):
                self.moves += 1
                # By place: frames that are equal are not the same.
                del queue[index]
                return frame
        return None

    def left_over(self) -> list[str]:
        return [f"{a}->{b}: group {f.group} of step {f.step}" for (a, b), q in self.queues.items() for f in q]


def empty(type: plan_pb2.TensorType) -> torch.Tensor:
    """A place in a buffer: it has its size for good."""
    dtype, nbytes = torch_dtype(type.element_type), tensor_bytes(type)
    if nbytes == 0:
        return torch.empty(tuple(type.shape), dtype=dtype)
    return torch.frombuffer(bytearray(nbytes), dtype=dtype).reshape(tuple(type.shape))


def view(memory: bytearray, offset: int, type: plan_pb2.TensorType) -> torch.Tensor:
    dtype, nbytes = torch_dtype(type.element_type), tensor_bytes(type)
    count = nbytes // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(tuple(type.shape))


def arena_places(arena: plan_pb2.SendArena, groups: Mapping[int, plan_pb2.Group]) -> dict[int, dict[int, torch.Tensor]]:
    """A sender's arena: the tensors of each group by their values. Groups overlap where the plan has them overlap."""
    memory = bytearray(arena.nbytes)
    return {
        place.group: {m.value: view(memory, place.offset + m.offset, m.type) for m in groups[place.group].members}
        for place in arena.places
    }


def check_type(group: plan_pb2.Group, tensors: Sequence[torch.Tensor]) -> None:
    for member, tensor in zip(group.members, tensors, strict=True):
        assert tuple(member.type.shape) == tuple(tensor.shape), (group.id, member.value)
        assert torch_dtype(member.type.element_type) is tensor.dtype, (group.id, member.value)
        assert member.offset % 64 == 0


class Role:
    """What wafers and shards have in common: values by number, and one place to send each group from."""

    def __init__(self, name: str, plan: plan_pb2.WaferPlan | plan_pb2.MemoryXPlan, wires: Wires) -> None:
        self.name, self.plan, self.wires = name, plan, wires
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

    def __init__(
        self,
        index: int,
        plan: plan_pb2.WaferPlan,
        kernels: Mapping[int, Kernel],
        wires: Wires,
        batches: Sequence[list[torch.Tensor]],
    ):
        super().__init__(f"wafer{index}", plan, wires)
        self.batches = batches
        self.number = torch.tensor([index])
        self.kernels = kernels

    def run(self) -> Iterator[None]:
        for step, batch in enumerate(self.batches, 1):
            self.values.clear()
            self.values[self.plan.number_value] = Held(self.number)
            for instruction in self.plan.instructions:
                match instruction.WhichOneof("kind"):
                    case "receive":
                        group = self.groups[instruction.receive.group]
                        if group.kind == plan_pb2.GROUP_KIND_BATCH:
                            self.accept(Frame.of(group, step, batch, as_bytes=True))
                            continue
                        while (frame := self.wires.take("swarmx", self.name, group.id, step)) is None:
                            yield
                        self.accept(frame)
                        if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
                            self.wires.taken[group.source_shard, self.name] += 1
                    case "run":
                        self.wires.moves += 1
                        yield  # a turn for the others between any two kernels
                        run = instruction.run
                        written = [self.group_of[value] for value in run.outputs if value in self.group_of]
                        yield from self.wait_for_places(written, step)
                        places = [self.place_of.get(value) for value in run.outputs]
                        inputs = [self.read(value) for value in run.inputs]
                        results = self.kernels[run.kernel](inputs, places)
                        if self.counts.credited:
                            shown = [t for v, t in zip(run.inputs, inputs, strict=True) if self.lies_in_arena(v)]
                            shown += [t for v, t in zip(run.outputs, results, strict=True) if self.lies_in_arena(v)]
                            clone_views(results, places, shown)
                        self.values |= {v: Held(tensor) for v, tensor in zip(run.outputs, results, strict=True)}
                        self.drop(run)
                    case "send":
                        group = self.groups[instruction.send.group]
                        yield from self.wait_for_places([group.id], step)
                        tensors = self.complete(group.id)
                        check_type(group, tensors)
                        as_bytes = is_for_coordinator_only(group)
                        self.wires.send(self.name, "swarmx", Frame.of(group, step, tensors, as_bytes=as_bytes))
                    case kind:
                        raise AssertionError(kind)

    def lies_in_arena(self, value: int) -> bool:
        return self.group_of.get(value) in self.counts.offsets

    def wait_for_places(self, groups: Sequence[int], step: int) -> Iterator[None]:
        """Until what lies in the groups' places has been released."""
        for group in groups:
            awaited = self.counts.awaited(group)
            while awaited is not None and self.wires.released["swarmx"] < self.counts.count(awaited, step):
                yield


class Shard(Role):
    """One MemoryX shard."""

    def __init__(
        self,
        plan: plan_pb2.MemoryXPlan,
        modules: Mapping[int, ModuleOp],
        wires: Wires,
        num_wafers: int,
        states: Mapping[str, torch.Tensor],
    ):
        super().__init__(f"shard{plan.shard}", plan, wires)
        self.num_wafers = num_wafers
        nbytes = sum(-(-tensor_bytes(slot.type) // 64) * 64 for slot in plan.states)
        self.memory = SharedMemory.create(max(nbytes, 64))
        self.states: dict[int, torch.Tensor] = {}
        self.names = {slot.name: slot.value for slot in plan.states}
        offset = 0
        for slot in plan.states:
            tensor = self.memory.tensor(torch_dtype(slot.type.element_type), tuple(slot.type.shape), offset)
            self.states[slot.value] = tensor.copy_(states[slot.name])
            offset += -(-tensor_bytes(slot.type) // 64) * 64
        self.kernels = {number: StateKernel(module, None, self.memory) for number, module in modules.items()}
        for group, places in self.places.items():
            if self.groups[group].kind == plan_pb2.GROUP_KIND_WEIGHTS:
                places |= {value: self.states[value] for value in places if value in self.states}
        runs = [i.run for i in plan.instructions if i.WhichOneof("kind") == "run"]
        committed = {v for run in runs for v, state in zip(run.outputs, run.commits, strict=False) if state}
        self.place_of = {v: t for v, t in self.place_of.items() if v not in committed and v not in self.states}
        received = [i.receive.group for i in plan.instructions if i.WhichOneof("kind") == "receive"]
        self.from_arena = [group for group in received if group in self.counts.offsets]
        self.borrowed: int | None = None
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
            for instruction in self.plan.instructions:
                match instruction.WhichOneof("kind"):
                    case "receive":
                        self.release(step)
                        group = self.groups[instruction.receive.group]
                        exchanged = group.kind == plan_pb2.GROUP_KIND_EXCHANGE
                        source = f"shard{group.source_shard}" if exchanged else "swarmx"
                        while (frame := self.wires.take(source, self.name, group.id, step)) is None:
                            yield
                        if instruction.receive.keep:
                            frame = dataclasses.replace(frame, tensors=[tensor.clone() for tensor in frame.tensors])
                        self.accept(frame)
                        self.borrowed = group.id if group.id in self.from_arena else None
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
                                members = {member.value for member in self.groups[self.borrowed].members}
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

    def release(self, step: int) -> None:
        """The gradients that were received last are read no more."""
        if self.borrowed is not None:
            told = self.counts.told_after(self.borrowed, self.from_arena)
            self.borrowed = None
            if told is not None:
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
                self.wires.send(self.name, "swarmx", Frame.of(group, step, tensors, as_bytes=False))
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
        return min(count // WEIGHTS_CREDIT_LOT * WEIGHTS_CREDIT_LOT for count in taken)


class SwarmX:
    """The one SwarmX node: everything goes on at once; sums lie in one buffer per group, or in the arena."""

    def __init__(self, plan: plan_pb2.SwarmXPlan, num_wafers: int, num_shards: int, wires: Wires) -> None:
        self.groups = {group.id: group for group in plan.groups}
        self.wafers = [f"wafer{i}" for i in range(num_wafers)]
        self.shards = [f"shard{i}" for i in range(num_shards)]
        self.wires = wires
        self.counts = ArenaCounts(plan.arena)
        self.sums = {group: list(tensors.values()) for group, tensors in arena_places(plan.arena, self.groups).items()}
        self.first = {f"shard{i}": count for i, count in first_counts(self.counts, plan.groups).items()}
        self.complete: deque[tuple[plan_pb2.Group, list[Frame]]] = deque()
        self.joined = 0  # groups of the arena

    def run(self) -> Iterator[None]:
        waiting: dict[tuple[int, int], dict[str, Frame]] = defaultdict(dict)
        while True:
            for shard in self.shards:
                while queue := self.wires.queues[shard, "swarmx"]:
                    frame = queue.popleft()
                    for wafer in self.wafers:
                        self.wires.send("swarmx", wafer, frame)
            for wafer in self.wafers:
                while queue := self.wires.queues[wafer, "swarmx"]:
                    frame = queue.popleft()
                    parts = waiting[frame.group, frame.step]
                    assert wafer not in parts, "a wafer sent a group twice in a step"
                    parts[wafer] = frame
                    if len(parts) == len(self.wafers):
                        group, frames = self.groups[frame.group], [parts[name] for name in self.wafers]
                        if group.id in self.counts.offsets:
                            self.complete.append((group, frames))
                        else:
                            self.join(group, frames)
                        del waiting[frame.group, frame.step]
            self.join_complete()
            yield

    def join_complete(self) -> None:
        """Joins gradients as far as their places have been released. One wafer's lie in its own arena."""
        released = min((max(first, self.wires.released[s]) for s, first in self.first.items()), default=0)
        while self.complete:
            group, frames = self.complete[0]
            awaited = self.counts.awaited(group.id)
            if len(frames) > 1 and awaited is not None and self.counts.count(awaited, frames[0].step) > released:
                break
            self.complete.popleft()
            assert self.counts.number(group.id, frames[0].step) == self.joined
            self.join(group, frames)
            self.joined += 1
        reached = released if len(self.wafers) == 1 else self.joined
        for count in self.counts.told_between(self.wires.released["swarmx"], reached):
            self.wires.released["swarmx"] = count
            self.wires.moves += 1

    def join(self, group: plan_pb2.Group, parts: list[Frame]) -> None:
        step = parts[0].step
        for part in parts:
            part.check("swarmx", part.tensors)
        if len(parts) == 1:
            joined = parts[0].tensors
        elif group.reduction == plan_pb2.REDUCTION_GATHER:
            joined = [torch.cat([part.tensors[0].reshape(-1) for part in parts])]
        else:
            assert len({member.type.element_type for member in group.members}) == 1
            buffers = self.sums.setdefault(group.id, [torch.empty_like(t) for t in parts[0].tensors])
            for place, *tensors in zip(buffers, *(part.tensors for part in parts), strict=True):
                place.copy_(self.reduced(group, tensors))
            joined = buffers
        bytes_only = is_for_coordinator_only(group)
        for shard in group.shards:
            self.wires.send("swarmx", f"shard{shard}", Frame.of(group, step, joined, as_bytes=bytes_only))
        if group.to_wafers:
            for wafer in self.wafers:
                self.wires.send("swarmx", wafer, Frame.of(group, step, joined, as_bytes=bytes_only))
        if group.to_coordinator:
            self.wires.send("swarmx", "coordinator", Frame.of(group, step, joined, as_bytes=True))

    @staticmethod
    def reduced(group: plan_pb2.Group, tensors: list[torch.Tensor]) -> torch.Tensor:
        total = tensors[0]
        for tensor in tensors[1:]:
            match group.reduction:
                case plan_pb2.REDUCTION_SUM:
                    total = total + tensor
                case plan_pb2.REDUCTION_MAX:
                    total = torch.maximum(total, tensor)
                case plan_pb2.REDUCTION_MIN:
                    total = torch.minimum(total, tensor)
                case kind:
                    raise AssertionError(kind)
        return total


class Simulation:
    """A plan with its state; `run` may be called again and again, and the state be changed in between."""

    def __init__(self, plan: plan_pb2.Plan, states: Mapping[str, torch.Tensor]) -> None:
        self.plan = plan
        self.states = {name: tensor.detach().clone() for name, tensor in states.items()}
        self.kernels = {kernel.id: Kernel.build(kernel.cirh) for kernel in plan.wafer.kernels}  # of all wafers
        self.modules = [{kernel.id: parse_module(kernel.cirh) for kernel in part.kernels} for part in plan.memoryx]

    def run(self, batches: Sequence[Sequence[torch.Tensor]], seed: int = 0) -> list[dict[str, torch.Tensor]]:
        """Some steps, one global batch each. Returns the outputs of each, by name."""
        plan, wires = self.plan, Wires()
        with torch.no_grad(), ExitStack() as memory:
            wafers = [
                Wafer(
                    i,
                    plan.wafer,
                    self.kernels,
                    wires,
                    [[self._rows(tensor, i) for tensor in batch] for batch in batches],
                )
                for i in range(plan.num_csx)
            ]
            shards = [
                Shard(part, modules, wires, plan.num_csx, self.states)
                for part, modules in zip(plan.memoryx, self.modules, strict=True)
            ]
            for shard in shards:
                memory.callback(shard.memory.close)
            swarmx = SwarmX(plan.swarmx, plan.num_csx, plan.num_shards, wires)
            threads = {wafer.name: wafer.run() for wafer in wafers}
            threads |= {shard.name: shard.run(len(batches)) for shard in shards}
            _take_turns(threads, swarmx.run(), wires, seed)
            outputs = [self._outputs(wires, step) for step in range(1, len(batches) + 1)]
        assert not wires.left_over(), wires.left_over()
        self._keep(shards)
        return outputs

    def _rows(self, tensor: torch.Tensor, wafer: int) -> torch.Tensor:
        rows = self.plan.worker.local_rows
        assert tensor.shape[0] == self.plan.worker.global_rows == rows * self.plan.num_csx
        return tensor[wafer * rows : (wafer + 1) * rows]

    def _outputs(self, wires: Wires, step: int) -> dict[str, torch.Tensor]:
        groups = {group.id: group for group in self.plan.coordinator.groups}
        frames: dict[int, memoryview] = {}
        for group in groups.values():
            source = "shard0" if group.kind == plan_pb2.GROUP_KIND_OUTPUT else "swarmx"
            frame = wires.take(source, "coordinator", group.id, step)
            assert frame is not None, f"group {group.id} of step {step} did not come"
            data = bytearray(group.nbytes)
            for member, tensor in zip(group.members, frame.tensors, strict=True):
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                data[member.offset : member.offset + len(raw)] = raw
            frames[group.id] = memoryview(data)
        found = {}
        for output in self.plan.coordinator.outputs:
            raw = bytearray(OutputReader(output, groups, self.plan.num_csx).read(frames[output.group]))
            dtype = torch_dtype(output.type.element_type)
            flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
            found[output.name] = flat.reshape(tuple(output.type.shape))
        return found

    def _keep(self, shards: Sequence[Shard]) -> None:
        """The states after the last step; copies of one state on several shards must be equal to the bit."""
        seen: set[str] = set()
        for shard in shards:
            replicated = {slot.name for slot in shard.plan.states if slot.replicated}
            for name, value in shard.names.items():
                tensor = shard.states[value].clone()
                if name in seen:
                    assert name in replicated, f"{name} lies on two shards"
                    assert torch.equal(tensor, self.states[name]) or bool(tensor.isnan().all()), f"{name} differs"
                self.states[name] = tensor
                seen.add(name)
        assert seen == set(self.states), set(self.states) - seen


def _take_turns(threads: dict[str, Iterator[None]], swarmx: Iterator[None], wires: Wires, seed: int) -> None:
    """Runs all roles to their end. seed: 0 round robin; then each role in turn the slowest; then by chance."""
    chance = random.Random(seed)
    names = list(threads)
    slow = names[seed - 1] if 0 < seed <= len(names) else None
    stuck: set[str] = set()  # roles that were tried and could not go on since anything last moved
    turn = 0
    while threads:
        ready = [name for name in threads if name not in stuck]
        if not ready:
            raise Deadlock(f"{', '.join(threads)} wait for one another")
        if len(ready) > 1 and slow in ready:
            ready.remove(slow)
        turn += 1
        name = chance.choice(ready) if seed else ready[turn % len(ready)]
        before = wires.moves
        try:
            next(threads[name])
        except StopIteration:
            del threads[name]
        next(swarmx)
        if wires.moves != before:
            stuck.clear()
        elif name in threads:
            stuck.add(name)
