"""Runs a plan in one process, as the roles run it: each role has one thread, and all of them take turns.

Every role is a generator that yields when it cannot go on. Which role goes next is drawn from a seeded generator, and
a few orders are as unfair as they can be (the slowest wafer, the fastest shard), so that what only holds by luck fails.

What is checked, besides the results: each RECEIVE gets what a SEND sent, and nothing is left over; a role that cannot
go on always can when the others have (no deadlock, with the window of the weights as it is); nobody reads a buffer
that has been written again since it was sent. For the last, a frame of more than INLINE_BYTES refers to the sender's
tensors, and gradient groups lie in an arena as the plan has it, where one overwrites another.
"""

import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from built_kernels import built_kernel
from simulated_links import Deadlock, Wires
from simulated_roles import Shard, ShardMemory, SwarmX, Wafer

from appliance.coordinator.execution.results import OutputDecoder
from waferbox.links.elements import torch_dtype
from wsc.v1 import plan_pb2


class Simulation:
    """A plan with its states. `run` may be called several times, and the states be changed in between."""

    def __init__(self, plan: plan_pb2.Plan, states: Mapping[str, torch.Tensor]) -> None:
        self.plan = plan
        self.states = {name: tensor.detach().clone() for name, tensor in states.items()}
        self.kernels = {kernel.id: built_kernel(kernel.cirh) for kernel in plan.wafer.kernels}  # of all wafers
        self.memories = [ShardMemory(part) for part in plan.memoryx]

    def run(self, batches: Sequence[Sequence[torch.Tensor]], seed: int = 0) -> list[dict[str, torch.Tensor]]:
        """Runs one step for each global batch. Returns the outputs of each step, by name."""
        plan, wires = self.plan, Wires()
        # A tree for all shards, or, in every second order, one for each; no tree for a single wafer.
        trees = list(range(plan.num_shards)) if seed % 2 and plan.num_shards > 1 else []
        with torch.no_grad():
            wafers = [
                Wafer(
                    i,
                    plan.wafer,
                    self.kernels,
                    wires,
                    [[part for tensor in batch for part in self._parts(tensor, i)] for batch in batches],
                    plan.num_csx,
                    trees,
                )
                for i in range(plan.num_csx)
            ]
            shards = [
                Shard(part, memory, wires, plan.num_csx, self.states, trees)
                for part, memory in zip(plan.memoryx, self.memories, strict=True)
            ]
            swarmx = [
                SwarmX(tree, plan.swarmx, plan.num_csx, plan.num_shards, wires, trees)
                for tree in (set(trees) or {0})
                if plan.num_csx > 1
            ]
            threads = {wafer.name: wafer.run() for wafer in wafers}
            threads |= {shard.name: shard.run(len(batches)) for shard in shards}
            _take_turns(threads, [node.run() for node in swarmx], wires, seed)
            outputs = [self._outputs(wires, step) for step in range(1, len(batches) + 1)]
        assert not wires.left_over(), wires.left_over()
        self._keep(shards)
        return outputs

    def _parts(self, tensor: torch.Tensor, wafer: int) -> Sequence[torch.Tensor]:
        """Returns the parts of a tensor of the batch, one for each micro-batch of a wafer."""
        rows = self.plan.worker.local_rows
        if self.plan.worker.global_rows == 1:
            return [tensor]  # one row, or tensors that differ in dimension 0
        assert tensor.shape[0] == self.plan.worker.global_rows == rows * self.plan.num_csx
        return tensor[wafer * rows : (wafer + 1) * rows].split(rows // self.plan.worker.micro_batches)

    def _outputs(self, wires: Wires, step: int) -> dict[str, torch.Tensor]:
        groups = {group.id: group for group in self.plan.coordinator.groups}
        frames: dict[int, memoryview] = {}
        for group in groups.values():
            wafers = "swarmx0" if self.plan.num_csx > 1 else "wafer0"
            source = "shard0" if group.kind == plan_pb2.GROUP_KIND_OUTPUT else wafers
            frame = wires.take(source, "coordinator", group.id, step)
            assert frame is not None, f"group {group.id} of step {step} did not come"
            data = bytearray(group.nbytes)
            members = group.members[:1] if group.reduction == plan_pb2.REDUCTION_GATHER else group.members
            for member, tensor in zip(members, frame.tensors, strict=True):
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                data[member.offset : member.offset + len(raw)] = raw
            frames[group.id] = memoryview(data)
        found = {}
        for output in self.plan.coordinator.outputs:
            read = bytearray(
                OutputDecoder(output, groups, self.plan.num_csx * self.plan.wafer.micro_batches).read(
                    frames[output.group]
                )
            )
            dtype = torch_dtype(output.type.element_type)
            flat = torch.frombuffer(read, dtype=dtype) if read else torch.empty(0, dtype=dtype)
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


def _take_turns(threads: dict[str, Iterator[None]], swarmx: Sequence[Iterator[None]], wires: Wires, seed: int) -> None:
    """Runs all roles to their end. seed: 0 round robin; then each role in turn the slowest; then by chance."""
    chance = random.Random(seed)
    names = list(threads)
    slow = names[seed - 1] if 0 < seed <= len(names) else None
    stuck: set[str] = set()  # the roles that have waited since the last action of any role
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
        for node in swarmx:
            next(node)
        if wires.moves != before:
            stuck.clear()
        elif name in threads:
            stuck.add(name)
