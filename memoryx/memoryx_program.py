"""A MemoryX shard's job and its step program, which sends weights, receives reduced gradients and updates the states.

The tensors of the states lie where the wafers read them (waferbox.states.store). An element-wise kernel writes a new
state directly into the buffer of the old one. The results of any other kernel are copied there, after the kernel has
read all its inputs.

A gradient group is read in its sender's memory, and released before the shard's next message. Members that the plan
keeps for longer are copied. If gradients come in rounds, those of later rounds are added to the copies of the first.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from memoryx.paging import Paging
from waferbox.cirh.execution.kernel import OperationFailed, clone_views
from waferbox.host.folders import cache_root
from waferbox.links.frame import INLINE_BYTES
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.links.shared_memory import Slice
from waferbox.runtime.arena import RELEASED_GROUP, ArenaCounts
from waferbox.runtime.groups import SendBuffers
from waferbox.runtime.loops import body_of
from waferbox.runtime.node_job import LinkKey
from waferbox.runtime.program import Program
from waferbox.runtime.progress import group_label, short_list
from waferbox.runtime.schedule import WEIGHTS_WINDOW, StepSchedule
from waferbox.runtime.swarmx_trees import tree_of
from waferbox.states.kernel_failures import KernelFailures
from waferbox.states.kernels import Buffers, Call, StateKernel, StateKernels
from waferbox.states.layout import StateRequirements
from waferbox.states.point_shares import PointShares, keep_due_states
from waferbox.states.state_job import StateJob
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2, plan_pb2


class MemoryXProgram:
    """The step program of one epoch on a shard. Owns the buffers of sent values that are not states.

    Used by the thread of the steps, `interrupt` aside. Raises ValueError for instructions that are not MemoryX's, and
    JobFailure if the memory limit is too small for one of them.
    """

    def __init__(
        self,
        plan: plan_pb2.MemoryXPlan,
        kernels: StateKernels,
        store: StateStore,
        snapshots: Snapshots,
        recovery_points: PointShares,
        hub: Hub,
        links: Mapping[LinkKey, Link],
        trees: Sequence[int] = (),
    ) -> None:
        """Compiles the plan.

        Args:
            plan: of the shard.
            kernels: those of the job.
            store: the states.
            snapshots: of the states.
            recovery_points: of the states.
            hub: of the links.
            links: to the roots of the SwarmX trees, or to a single wafer; to other shards, and of shard 0 to the
                coordinator.
            trees: the number of each shard's SwarmX tree; empty: there is one tree, or none.
        """
        self._program = Program(hub, "update")
        self.progress = self._program.progress
        self._slots = {slot.value: slot.name for slot in plan.states}
        # The names of values on a timeline: of states, and of the groups that values were received in.
        self._names = {slot.value: slot.name.removeprefix("state.") for slot in plan.states}
        self._origins: dict[int, str] = {}
        self._bytes_of_messages: set[int] = set()  # received values that lie at another address in each step
        self._failures = KernelFailures(plan.sources)
        self._store = store
        self._snapshots = snapshots
        self._recovery_points = recovery_points
        self._shard = plan.shard
        self._links = links
        self._trees = trees
        towards_wafers = (node_pb2.LINK_PURPOSE_SWARMX, node_pb2.LINK_PURPOSE_WAFER)
        self._roots = {tree: link for (purpose, tree), link in links.items() if purpose in towards_wafers}
        own_root = self._roots[trees[plan.shard] if trees else 0]
        own_root.limit_credit(WEIGHTS_WINDOW)
        self._expect(plan.groups)
        self._states = {slot.value: store.tensor(slot.name) for slot in plan.states}
        for value, tensor in self._states.items():
            index = self._program.values.index(value)
            self._program.values.tensors[index] = tensor
        self._state_values = dict(self._states)  # values that are states, or are committed to them
        groups = {group.id: group for group in plan.groups}
        texts = {kernel.id: kernel.cirh for kernel in plan.kernels}
        made = kernels.make(texts, store.memory, cache_root() / "kernels")
        self._buffers = self._make_buffers(plan, groups, store)
        self._counts = ArenaCounts(plan.arena)
        body = body_of(plan.loop)
        received = {i.receive.group for i in plan.instructions if i.HasField("receive")}
        self._from_arena = received & self._counts.offsets.keys()
        self._released_counts = self._counts.released_counts(self._from_arena)
        # Each of these nodes bounds the gradients of its tree by the count of all that the shard has released.
        releasing = {tree_of(groups[group], trees) for group in self._from_arena}
        self._releasing = [self._roots[tree] for tree in sorted(releasing)]
        self._borrowed: plan_pb2.Group | None = None  # the group of the arena that is not released yet
        summed = {i.receive.adds_to for i in plan.instructions if i.receive.adds_to}
        self._paging = Paging(plan, store, self._program, own_root)
        for position, instruction in enumerate(plan.instructions):
            if body and position == body.start:
                self._add_release()
                self._program.begin_loop(plan.loop.times)
                self._paging.begin_loop(plan.loop.times)
            if body and position == body.stop:
                self._add_release()
                self._program.end_loop()
                self._paging.end_loop()
            match instruction.WhichOneof("kind"):
                case "receive":
                    self._add_release()
                    group = groups[instruction.receive.group]
                    if instruction.receive.adds_to:
                        self._add_addition(group, groups[instruction.receive.adds_to])
                    else:
                        is_summed = group.id in summed
                        self._add_receive(group, keep=instruction.receive.keep, is_summed=is_summed)
                    self._borrowed = group if group.id in self._from_arena else None
                case "run":
                    self._add_run(instruction.run, made[instruction.run.kernel])
                case "send":
                    self._add_release()
                    self._add_send(groups[instruction.send.group])
                case "commit":
                    self._add_commit(instruction.commit)
                case kind:
                    raise ValueError(f"MemoryX has no instruction {kind}")
        self._add_release()
        self._paging.prepare()

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        recovery_points = self._recovery_points
        keep_states = partial(keep_due_states, recovery_points, self._snapshots, schedule, self.progress)
        for link in self._links.values():
            link.limit_ahead(schedule.run_ahead_steps)
        if schedule.checkpoint_steps:
            self._store.reserve_snapshot()
        recovery_points.keep_first(self.progress)
        self._paging.start(schedule.num_steps)
        seconds = self._program.run(schedule, keep_states)
        recovery_points.keep_last(self.progress)
        return seconds

    def interrupt(self) -> None:
        self._snapshots.interrupt()
        self._recovery_points.interrupt()
        self._paging.interrupt()

    def close(self) -> None:
        self._paging.close()
        self._program.close()
        self._states.clear()
        self._state_values.clear()
        self._buffers.close()

    def _make_buffers(
        self, plan: plan_pb2.MemoryXPlan, groups: Mapping[int, plan_pb2.Group], store: StateStore
    ) -> SendBuffers:
        sent = [groups[i.send.group] for i in plan.instructions if i.WhichOneof("kind") == "send"]
        homes = {}
        for group in sent:
            base = store.group_base(group.id)
            if base is not None:
                homes[group.id] = Slice(store.memory, base, group.nbytes)
        runs = [instruction.run for instruction in plan.instructions if instruction.WhichOneof("kind") == "run"]
        for run in runs:
            for output, state in zip(run.outputs, run.commits, strict=False):
                if state:
                    self._state_values[output] = self._states[state]
        return SendBuffers(
            sent, {value for run in runs for value in run.outputs}, homes=homes, settled=self._state_values
        )

    def _expect(self, groups: Iterable[plan_pb2.Group]) -> None:
        for (purpose, index), link in self._links.items():
            match purpose:
                case node_pb2.LINK_PURPOSE_SWARMX | node_pb2.LINK_PURPOSE_WAFER:
                    reductions = (group for group in groups if group.kind == plan_pb2.GROUP_KIND_REDUCTION)
                    arriving = [group for group in reductions if tree_of(group, self._trees) == index]
                case node_pb2.LINK_PURPOSE_SHARD:
                    exchanges = (group for group in groups if group.kind == plan_pb2.GROUP_KIND_EXCHANGE)
                    arriving = [group for group in exchanges if group.source_shard == index]
                case _:
                    arriving = []
            link.expect({group.id: group.nbytes for group in arriving})

    def _root_of(self, group: plan_pb2.Group) -> Link:
        """Returns the link to the root of the SwarmX tree that carries a group, or to a single wafer."""
        return self._roots[tree_of(group, self._trees)]

    def _add_receive(self, group: plan_pb2.Group, *, keep: bool, is_summed: bool) -> None:
        self._origins.update((member.value, group_label(group)) for member in group.members)
        if group.kind == plan_pb2.GROUP_KIND_EXCHANGE:
            link = self._links[node_pb2.LINK_PURPOSE_SHARD, group.source_shard]
            self._program.add_receive(group, [link])
        else:
            link = self._root_of(group)
            self._program.add_receive(group, [link], keep=keep, is_written=is_summed)
        if link.lane == "grpc" and group.nbytes > INLINE_BYTES:
            self._bytes_of_messages.update(member.value for member in group.members)

    def _add_addition(self, group: plan_pb2.Group, first: plan_pb2.Group) -> None:
        """Adds actions that receive the gradients of a later round, and add them to those of the first."""
        self._program.add_receive(group, [self._root_of(group)])
        values = self._program.values
        tensors = values.tensors
        pairs = list(
            zip(
                values.indices(member.value for member in first.members),
                values.indices(member.value for member in group.members),
                strict=True,
            )
        )

        def add(step: int) -> None:
            for total, part in pairs:
                tensors[total].add_(tensors[part])
                tensors[part] = None

        self._program.add(add, group_label(group))

    def _add_release(self) -> None:
        """Adds an action that releases the group that was received last, if its sender awaits the count."""
        group, self._borrowed = self._borrowed, None
        released = self._released_counts[group.id] if group is not None else ()
        if not any(released):
            return
        program, roots, counts, nothing = self._program, self._releasing, self._counts, self._buffers.nothing

        def release(step: int) -> None:
            if count := released[program.repetition]:
                for root in roots:
                    program.hub.send(root, RELEASED_GROUP, counts.count(count, step), nothing)

        self._program.add(release, "gradients read", what="send")

    def _add_send(self, group: plan_pb2.Group) -> None:
        values = {member.value for member in group.members} & self._state_values.keys()
        is_lent = group.kind == plan_pb2.GROUP_KIND_WEIGHTS
        if values or is_lent:
            self._paging.add([self._state_values[value] for value in values], lent=is_lent)
        match group.kind:
            case plan_pb2.GROUP_KIND_WEIGHTS:
                self._program.add_send(group, [self._root_of(group)], self._buffers, window="credit")
            case plan_pb2.GROUP_KIND_OUTPUT:
                coordinator = self._links[node_pb2.LINK_PURPOSE_COORDINATOR, 0]
                self._program.add_send(group, [], self._buffers, coordinator=coordinator)
            case plan_pb2.GROUP_KIND_EXCHANGE:
                # As bytes: the other shard may still read the group of the step before.
                shards = [
                    self._links[node_pb2.LINK_PURPOSE_SHARD, shard] for shard in group.shards if shard != self._shard
                ]
                self._program.add_send(group, shards, self._buffers, as_bytes=True)
            case kind:
                raise ValueError(f"MemoryX sends no group of kind {kind}")

    def _add_run(self, run: plan_pb2.Run, kernel: StateKernel) -> None:
        inputs = self._program.values.indices(run.inputs)
        states = [self._states[state] if state else None for state in run.commits] or [None] * len(run.outputs)
        destinations = [self._buffers.destination(value) for value in run.outputs]
        passing = [i for i, value in enumerate(run.inputs) if value in self._bytes_of_messages]
        # The sender overwrites a released group, so no result may remain a view of one.
        borrowed = {member.value for member in self._borrowed.members} if self._borrowed is not None else set()
        shown = [i for i, value in enumerate(run.inputs) if value in borrowed]
        read = [self._state_values[value] for value in run.inputs if value in self._state_values]
        written = [state for state in states if state is not None]
        count = self._paging.parts([*read, *written]) if kernel.may_be_parted(states, destinations) else 1
        for part in range(count):
            self._paging.add(read, written, part=(part, count))
            call = kernel.bind(states, destinations, passing, (part, count))
            if kernel.may_show_inputs and shown and self._counts.credited:
                call = _without_views(
                    call, [p if s is None else s for s, p in zip(states, destinations, strict=True)], shown
                )
            self._add_call(run, call, inputs, (part, count))

    def _add_call(self, run: plan_pb2.Run, call: Call, inputs: Sequence[int], part: tuple[int, int]) -> None:
        """Adds an action that calls the kernel of a run, or of a part of it: (number, count)."""
        store, values, failures = self._store, self._program.values, self._failures
        tensors = values.tensors
        committed = [self._slots[state] for state in run.commits if state]
        is_last = part[0] + 1 == part[1]
        outputs, drops = values.indices(run.outputs), values.indices(run.drops) if is_last else []

        def run_kernel(step: int) -> None:
            if store.copies_on_write:
                store.before_write(committed, part)
            try:
                results = call([tensors[index] for index in inputs])
            except OperationFailed as error:
                raise failures.failure(run, step, error) from error
            for index, result in zip(outputs, results, strict=True):
                tensors[index] = result
            for index in drops:
                tensors[index] = None

        names = [self._names[state] for state in run.commits if state]
        names = names or list(dict.fromkeys(self._origins[value] for value in run.inputs if value in self._origins))
        self._program.add(run_kernel, short_list(names) if names else f"kernel {run.kernel}")

    def _add_commit(self, commit: plan_pb2.Commit) -> None:
        tensors = self._program.values.tensors
        index = self._program.values.index(commit.value)
        state = self._states[commit.state]

        store, name = self._store, self._slots[commit.state]

        def copy(step: int) -> None:
            if store.copies_on_write:
                store.before_write([name])
            state.copy_(tensors[index])

        self._paging.add([], [state])
        self._program.add(copy, self._names[commit.state])


def _without_views(call: Call, destinations: Buffers, shown: Sequence[int]) -> Call:
    """Returns the call with results that are no views of the inputs `shown`."""

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        results = list(call(inputs))
        clone_views(results, destinations, [inputs[i] for i in shown])
        return results

    return run


# --- A job on a shard of MemoryX --------------------------------------------------------------------------------------


def requirements_of(plan: plan_pb2.MemoryXPlan) -> StateRequirements:
    """Returns the states of a plan, and the order in which its instructions send and write them."""
    names = {slot.value: slot.name for slot in plan.states}
    weights = {group.id: group for group in plan.groups if group.kind == plan_pb2.GROUP_KIND_WEIGHTS}
    sent: list[plan_pb2.Group] = []
    written: dict[str, None] = {}
    for instruction in plan.instructions:
        match instruction.WhichOneof("kind"):
            case "send":
                group = weights.pop(instruction.send.group, None)
                if group is not None and any(member.value in names for member in group.members):
                    sent.append(group)
            case "commit":
                written[names[instruction.commit.state]] = None
            case "run":
                written |= dict.fromkeys(names[state] for state in instruction.run.commits if state)
    return StateRequirements(slots=plan.states, weights_groups=sent, write_order=list(written))


class MemoryXJob(StateJob):
    """A job on a shard of MemoryX. Its states last as long as the job; each epoch has a program that updates them."""

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> MemoryXProgram:
        plan, states = request.memoryx, self._states
        states.load(requirements_of(plan), request.recovery_point)
        return MemoryXProgram(
            plan,
            states.kernels,
            states.store,
            states.snapshots,
            states.recovery_points,
            hub,
            links,
            list(request.trees),
        )
