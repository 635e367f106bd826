"""Runs a pipelined plan in one process: each region is a generator, and all of them take turns.

Which region goes next is drawn from a seeded generator; with a small seed one region is as slow as it can be. Values
are dropped as the plan says and cannot be read then; states are overwritten in place, and who reads one that was
overwritten since the step began, or a view of it, is told so.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from built_kernels import built_kernel
from simulated_links import Deadlock, Hazard, check_type
from simulated_roles import reduced

from appliance.coordinator.execution.results import OutputDecoder
from waferbox.cirh.execution.kernel import Kernel
from waferbox.links.elements import torch_dtype
from wsc.v1 import plan_pb2


class PipelineSimulation:
    """A plan with its states. `run` may be called several times, and the states be changed in between."""

    def __init__(self, plan: plan_pb2.Plan, states: Mapping[str, torch.Tensor]) -> None:
        self.plan = plan
        self.pipeline = plan.pipeline
        self.states = {name: tensor.detach().clone() for name, tensor in states.items()}
        self.kernels = {kernel.id: built_kernel(kernel.cirh) for kernel in self.pipeline.kernels}
        self.most_bytes = 0  # of a step so far: activations, and whatever else kernels made
        names = {slot.name for slot in self.pipeline.states}
        assert names == set(states), names ^ set(states)

    def run(self, batches: Sequence[Sequence[torch.Tensor]], seed: int = 0) -> list[dict[str, torch.Tensor]]:
        """Runs one step for each global batch. Returns the outputs of each step, by name."""
        chance = random.Random(seed)
        self.states = {name: tensor.detach().clone() for name, tensor in self.states.items()}
        with torch.no_grad():
            return [self._step(batch, seed, chance) for batch in batches]

    def _step(self, batch: Sequence[torch.Tensor], seed: int, chance: random.Random) -> dict[str, torch.Tensor]:
        size = self.plan.worker.local_rows // self.pipeline.micro_batches
        assert self.plan.worker.local_rows == self.plan.worker.global_rows == self.plan.batch_rows
        parts = [part.clone() for tensor in batch for part in tensor.split(size)]
        step = _Step(self.pipeline, self.kernels, self.states, parts)
        threads = [step.region(number) for number in range(len(self.pipeline.regions))]
        slow = seed - 1 if 0 < seed <= len(threads) else None
        _take_turns(threads, step, slow, chance)
        assert not step.missing(), step.missing()
        self.most_bytes = max(self.most_bytes, step.most_bytes)
        return {output.name: self._output(output, step.sent) for output in self.plan.coordinator.outputs}

    def _output(self, output: plan_pb2.Output, sent: Mapping[int, bytes]) -> torch.Tensor:
        groups = {group.id: group for group in self.plan.coordinator.groups}
        raw = bytearray(OutputDecoder(output, groups, self.pipeline.micro_batches).read(memoryview(sent[output.group])))
        dtype = torch_dtype(output.type.element_type)
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(tuple(output.type.shape))


class _Step:
    """The values of a step, which all regions share."""

    def __init__(
        self,
        plan: plan_pb2.PipelinePlan,
        kernels: Mapping[int, Kernel],
        states: dict[str, torch.Tensor],
        batch: Sequence[torch.Tensor],
    ) -> None:
        self.plan, self.kernels, self.batch = plan, kernels, batch
        self.groups = {group.id: group for group in plan.groups}
        self.states = {slot.value: states[slot.name] for slot in plan.states}
        self.joined = {value.value: value for value in plan.joined}
        self.values: dict[int, torch.Tensor] = dict(self.states)
        self.values |= {value: torch.tensor([k]) for k, value in enumerate(plan.number_values)}
        self.parts: Counter[int] = Counter()  # of joined values, that were made
        self.reads = Counter(value for region in plan.regions for i in region.instructions for value in i.run.inputs)
        regions_of: dict[int, set[int]] = defaultdict(set)
        for number, region in enumerate(plan.regions):
            for instruction in region.instructions:
                for value in instruction.run.inputs:
                    regions_of[value].add(number)
        members = {member.value for group in plan.groups for member in group.members}
        committed = {i.commit.value for region in plan.regions for i in region.instructions}
        # A value that several regions read is dropped after its last read.
        kept = members | committed | set(self.states) | set(plan.number_values)
        self.counted = {value for value, regions in regions_of.items() if len(regions) > 1} - kept
        self.sent: dict[int, bytes] = {}
        self.overwritten: list[tuple[int, int]] = []  # bytes of states that are new
        self.new: dict[int, torch.Tensor] = {}  # values that lie in the buffers of states
        self.newest: dict[int, int] = {}  # by state, of these
        self.stale: set[int] = set()  # values whose buffers have others
        self.made_by_kernels: set[int] = set()
        self.held_bytes = 0  # of what kernels made, beside joined values and states
        self.most_bytes = 0
        self.moves = 0

    def there(self, value: int) -> bool:
        if value in self.joined:
            return self.parts[value] == self.plan.micro_batches
        return value in self.values

    def read(self, value: int, once: bool = True) -> torch.Tensor:
        tensor = self.values[value]
        start, end = _bytes(tensor)
        if value in self.stale:
            raise Hazard(f"value {value} was overwritten by a later micro-batch")
        is_old = value not in self.new and not self.plan.asynchronous_updates
        if is_old and any(first < end and start < last for first, last in self.overwritten):
            raise Hazard(f"value {value} is read from a state that was overwritten")
        return tensor

    def region(self, number: int) -> Iterator[None]:
        for instruction in self.plan.regions[number].instructions:
            match instruction.WhichOneof("kind"):
                case "receive":
                    group = self.groups[instruction.receive.group]
                    check_type(group, self.batch)
                    for member, tensor in zip(group.members, self.batch, strict=True):
                        self.make(member.value, tensor)
                case "run":
                    while not all(map(self.there, instruction.run.inputs)):
                        yield
                    self.moves += 1
                    yield  # The other regions run between any two kernels.
                    self.run(instruction.run)
                case "commit":
                    while not self.there(instruction.commit.value):
                        yield
                    state = self.states[instruction.commit.state]
                    state.copy_(self.read(instruction.commit.value))
                    self.overwritten.append(_bytes(state))
                case "send":
                    group = self.groups[instruction.send.group]
                    while not all(self.there(member.value) for member in group.members):
                        yield
                    data = bytearray(group.nbytes)
                    for member in group.members:
                        raw = self.read(member.value).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                        data[member.offset : member.offset + len(raw)] = raw
                    self.sent[group.id] = bytes(data)
                case kind:
                    raise AssertionError(kind)
            self.moves += 1

    def run(self, run: plan_pb2.Run) -> None:
        inputs = [self.read(value) for value in run.inputs]
        commits = list(run.commits) or [0] * len(run.outputs)
        places = [self.states[state] if state else None for state in commits]
        before = [tensor.clone() for tensor in inputs]
        results = self.kernels[run.kernel](inputs, places)
        for state in filter(None, commits):
            self.overwritten.append(_bytes(self.states[state]))
        written = [_bytes(self.states[state]) for state in commits if state]
        for tensor, kept in zip(inputs, before, strict=True):
            start, end = _bytes(tensor)
            if not any(first < end and start < last for first, last in written):
                assert torch.equal(tensor, kept) or bool(kept.isnan().any()), "a kernel changed what it reads"
        for value, tensor, state in zip(run.outputs, results, commits, strict=True):
            if state:
                self.new[value] = tensor
                self.stale.add(self.newest.get(state, 0))
                self.newest[state] = value
            elif value not in self.joined:
                self.made_by_kernels.add(value)
                self.held_bytes += tensor.nbytes
            self.make(value, tensor)
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        for value in run.drops:
            self.drop(value)
        for value in self.counted.intersection(run.inputs):
            self.reads[value] -= sum(other == value for other in run.inputs)
            if not self.reads[value]:
                self.drop(value)

    def drop(self, value: int) -> None:
        tensor = self.values.pop(value)
        if value in self.made_by_kernels:
            self.held_bytes -= tensor.nbytes

    def make(self, value: int, tensor: torch.Tensor) -> None:
        if value in self.joined and value in self.values:
            reduction = self.joined[value].reduction
            self.values[value] = reduced(reduction, [self.values[value], tensor])
        else:
            assert value not in self.values, f"value {value} is made twice"
            self.values[value] = tensor.clone() if value in self.joined else tensor
        self.parts[value] += 1

    def missing(self) -> list[int]:
        """Returns the joined values that lack parts."""
        return [value for value in self.joined if self.parts[value] != self.plan.micro_batches]


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.untyped_storage().data_ptr()
    return start, start + tensor.untyped_storage().nbytes()


def _take_turns(threads: list[Iterator[None]], step: _Step, slow: int | None, chance: random.Random) -> None:
    """Runs all regions to their end. The slow one runs only while all others wait."""
    left = dict(enumerate(threads))
    stuck: set[int] = set()
    while left:
        ready = [number for number in left if number not in stuck]
        if not ready:
            raise Deadlock(f"regions {list(left)} wait for one another")
        if len(ready) > 1 and slow in ready:
            ready.remove(slow)
        number = chance.choice(ready)
        moves = step.moves
        try:
            next(left[number])
        except StopIteration:
            del left[number]
            stuck.clear()
            continue
        if step.moves != moves:
            stuck.clear()
        else:
            stuck.add(number)
