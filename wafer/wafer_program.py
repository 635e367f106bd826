"""The step program of a wafer: it receives a batch and weights, runs kernels, and sends the groups to be reduced.

No value stays from one step to the next. Kernels write sent values directly into the memory that receivers read. Large
gradients take turns in an arena: before a kernel writes there, the program waits for the count of released groups that
the plan names. An arena with room for all groups of a step, and every other buffer, needs no count: before a group is
written again, the plan makes the wafer receive a group from every shard that reads it, and a shard sends that one only
after the read. Groups for the coordinator alone travel as bytes.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from wafer.joins import adding, beside_inputs, joining
from wafer.kernels import WaferKernel, WaferKernels
from wafer.large_tensors import limit_large_tensors, release_large_tensors
from wafer.routes import Routes
from waferbox.cirh.execution.kernel import Kernel, OperationFailed, clone_views
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.runtime.arena import RELEASED_GROUP, ArenaCounts, direct_values
from waferbox.runtime.groups import SendBuffers
from waferbox.runtime.loops import body_of
from waferbox.runtime.node_job import LinkKey
from waferbox.runtime.program import Action, Program
from waferbox.runtime.schedule import WEIGHTS_CREDIT_BATCH, StepSchedule, is_for_coordinator_only, worker_of_step
from waferbox.states.kernel_failures import KernelFailures
from wsc.v1 import node_pb2, plan_pb2


class WaferProgram:
    """The step program of one epoch on a wafer. Owns the buffers of its sent groups. Used by the thread of the steps.

    Raises ValueError for instructions that are not a wafer's, and without a link towards MemoryX.
    """

    def __init__(
        self,
        plan: plan_pb2.WaferPlan,
        number: int,
        kernels: WaferKernels,
        hub: Hub,
        links: Mapping[LinkKey, Link],
        trees: Sequence[int] = (),
    ) -> None:
        """Compiles the plan.

        Args:
            plan: of the wafers.
            number: this wafer's, among all wafers of the job.
            kernels: the wafer's library of kernels.
            hub: of the links.
            links: to the workers, and to the parent in each SwarmX tree; of a single wafer to the workers, to each
                shard and to the coordinator.
            trees: the number of each shard's tree; empty: there is one tree, or none.
        """
        self._program = Program(hub, "compute", measures_layers=number == 0)  # all wafers do the same
        self.progress = self._program.progress
        values = self._program.values
        self._at_once, self._times = plan.micro_batches_at_once, plan.loop.times
        self._looped = frozenset(plan.looped_parts)
        # The indices of all repetitions' parts follow one another as their numbers do.
        parts = sorted(value + self._at_once * number for value in self._looped for number in range(self._times))
        values.indices(parts)
        for micro_batch, value in enumerate(plan.number_values):
            values.tensors[values.index(value)] = torch.tensor([number * plan.micro_batches + micro_batch])
        self._routes = Routes(links, trees)
        workers = sorted(index for purpose, index in links if purpose == node_pb2.LINK_PURPOSE_WORKER)
        self._workers = [links[node_pb2.LINK_PURPOSE_WORKER, index] for index in workers]
        self._taken: dict[int, int] = {}  # the number of weights groups taken, by shard
        groups = {group.id: group for group in plan.groups}
        self._expect(plan.groups)
        self._kernels = kernels
        self._failures = KernelFailures(plan.sources)
        made = kernels.make(plan.kernels, plan.kernel_library)
        kinds = [instruction.WhichOneof("kind") for instruction in plan.instructions]
        sent = [i.send.group for i, kind in zip(plan.instructions, kinds, strict=True) if kind == "send"]
        produced = {value for i in plan.instructions for value in i.run.outputs}
        if not self._looped.isdisjoint(produced):
            produced.update(parts)
        self._reductions = {
            member.value: group.reduction
            for group in plan.groups
            if group.kind == plan_pb2.GROUP_KIND_REDUCTION
            for member in group.members
        }
        self._sums = {joined.value for joined in plan.joined}  # values summed over micro-batches outside of a buffer
        self._joined = self._reductions.keys() | self._sums  # values to which several micro-batches add
        self._made: set[int] = set()  # the outputs of the runs added so far
        self._has_micro_batches = plan.micro_batches > 1
        self._counts = ArenaCounts(plan.arena)
        self._released = self._routes.first_counts(self._counts, plan.groups)  # by link
        self._buffers = SendBuffers(
            (groups[group] for group in sent),
            produced,
            arena=plan.arena,
            direct=direct_values(plan) if self._counts.credited else produced,
        )
        limit_large_tensors(plan.own_bytes - self._buffers.nbytes)
        body = body_of(plan.loop)
        for position, (instruction, kind) in enumerate(zip(plan.instructions, kinds, strict=True)):
            if body and position == body.start:
                self._program.begin_loop(plan.loop.times)
            if body and position == body.stop:
                self._program.end_loop()
            match kind:
                case "receive":
                    self._add_receive(groups[instruction.receive.group])
                case "run":
                    self._add_run(instruction.run, made[instruction.run.kernel])
                case "send":
                    self._add_send(groups[instruction.send.group])
                case _:
                    raise ValueError(f"a wafer has no instruction {kind}")
        if any(group.kind == plan_pb2.GROUP_KIND_BATCH for group in plan.groups):
            self._program.add(self._acknowledge_batch, "batch taken", what="send")

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        self._routes.limit_ahead(schedule.run_ahead_steps)
        return self._program.run(schedule)

    def interrupt(self) -> None:
        """Has no effect: all waits are the hub's."""

    def close(self) -> None:
        self._program.close()
        self._kernels.release()
        self._buffers.close()
        release_large_tensors()

    def _expect(self, groups: Sequence[plan_pb2.Group]) -> None:
        batch = {group.id: group.nbytes for group in groups if group.kind == plan_pb2.GROUP_KIND_BATCH}
        for link in self._workers:
            link.expect(batch)
        self._routes.expect(groups)

    def _add_receive(self, group: plan_pb2.Group) -> None:
        if group.kind == plan_pb2.GROUP_KIND_BATCH:
            self._program.add_receive(group, self._workers)
            return
        link = self._routes.source(group)
        if link is not None:
            self._program.add_receive(group, [link])
        if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
            credit = f"credit memoryx-{group.source_shard}"
            self._program.add(self._count_taken(group.source_shard), credit, what="send", layer=group.layer)

    def _add_send(self, group: plan_pb2.Group) -> None:
        self._add_waits([group.id])
        self._program.add_send(
            group,
            self._routes.targets(group),
            self._buffers,
            as_bytes=is_for_coordinator_only(group),
            coordinator=self._routes.coordinator(group),
        )

    def _add_run(self, run: plan_pb2.Run, kernel: WaferKernel) -> None:
        self._add_waits(group for value in run.outputs if (group := self._buffers.home_group(value)) is not None)
        if run.overwritten:
            assert isinstance(kernel, Kernel), "only such a kernel reuses memory"
            kernel = kernel.writing_over(run.overwritten)
        kernel = self._beside_arena(run, kernel)
        values = self._program.values
        tensors, failures = values.tensors, self._failures
        inputs, outputs, drops = values.indices(run.inputs), values.indices(run.outputs), values.indices(run.drops)
        # The kernel may free what it is the last to read.
        freed, dropped = set(drops).difference(outputs), set(drops).intersection(outputs)
        destinations = [None if value in self._made else self._buffers.destination(value) for value in run.outputs]
        sums = {index: slot for index, slot in enumerate(outputs) if run.outputs[index] in self._sums}
        if not self._made.isdisjoint(value for value in run.outputs if value in self._joined):
            kernel = self._joining(run, kernel)
            kernel = adding(kernel, sums, tensors) if sums else kernel
        elif sums:
            kernel = beside_inputs(kernel, sums)
        self._made.update(run.outputs)

        def run_kernel(step: int) -> None:
            given = [tensors[index] for index in inputs]
            for index in freed:
                tensors[index] = None
            try:
                results = kernel(given, destinations)
            except OperationFailed as error:
                raise failures.failure(run, step, error) from error
            for index, result in zip(outputs, results, strict=True):
                tensors[index] = result
            for index in dropped:
                tensors[index] = None

        is_looped = not self._looped.isdisjoint((*run.inputs, *run.outputs))
        what = run.layer or f"kernel {run.kernel}"
        self._program.add(
            self._looped_run(run, kernel, destinations) if is_looped else run_kernel,
            f"{what}, micro-batch {run.micro_batch + 1}" if self._has_micro_batches else what,
            layer=run.layer,
        )

    def _looped_run(
        self, run: plan_pb2.Run, kernel: WaferKernel, destinations: Sequence[torch.Tensor | None]
    ) -> Action:
        """Returns the action of a run in the loop with values of which each repetition has others."""
        program, values, at_once = self._program, self._program.values, self._at_once
        tensors, failures = values.tensors, self._failures

        def steps(numbers: Sequence[int]) -> list[tuple[int, int]]:
            """The index of each value in the first repetition, and its distance to that of the next."""
            return [(values.index(value), at_once if value in self._looped else 0) for value in numbers]

        inputs, outputs, drops = steps(run.inputs), steps(run.outputs), steps(run.drops)
        freed, dropped = set(drops).difference(outputs), set(drops).intersection(outputs)  # as in other runs
        by_repetition = [destinations] * self._times
        if not self._looped.isdisjoint(run.outputs):
            by_repetition = [
                [
                    self._buffers.destination(value + number * at_once) if value in self._looped else destination
                    for value, destination in zip(run.outputs, destinations, strict=True)
                ]
                for number in range(self._times)
            ]

        def run_kernel(step: int) -> None:
            repetition = program.repetition
            given = [tensors[index + repetition * distance] for index, distance in inputs]
            for index, distance in freed:
                tensors[index + repetition * distance] = None
            try:
                results = kernel(given, by_repetition[repetition])
            except OperationFailed as error:
                raise failures.failure(run, step, error) from error
            for (index, distance), result in zip(outputs, results, strict=True):
                tensors[index + repetition * distance] = result
            for index, distance in dropped:
                tensors[index + repetition * distance] = None

        return run_kernel

    def _joining(self, run: plan_pb2.Run, kernel: WaferKernel) -> WaferKernel:
        """Returns the kernel of a later micro-batch, which joins values to be reduced to those of the earlier ones."""
        joined = {}
        for index, value in enumerate(run.outputs):
            if value in self._made and value in self._reductions:
                destination = self._buffers.destination(value)
                assert destination is not None, "a value to be reduced is sent"
                joined[index] = (destination, self._reductions[value])
        return joining(kernel, joined)

    def _add_waits(self, groups: Iterable[int]) -> None:
        """Adds waits for the release of the groups whose places in the arena these groups take."""
        awaited = {count for group in groups if (count := self._counts.awaited(group)) is not None}
        for count in sorted(awaited):
            self._program.add(self._wait_for_release(count), "gradients taken", what="send")

    def _wait_for_release(self, awaited: int) -> Action:
        program, released, counts, progress = self._program, self._released, self._counts, self.progress
        now = time.perf_counter

        def wait(step: int) -> None:
            count = counts.count(awaited, step, program.repetition)
            begin = now()
            for link in released:
                while released[link] < count:
                    released[link] = program.hub.receive(link, RELEASED_GROUP).step
            progress.send += now() - begin

        return wait

    def _beside_arena(self, run: plan_pb2.Run, kernel: WaferKernel) -> WaferKernel:
        """Returns the kernel of a run, whose results outside of the arena are no views of the arena.

        Another group overwrites the arena, perhaps before a later kernel reads such a view.
        """
        if not self._counts.credited:
            return kernel
        in_arena = self._counts.offsets.keys()
        read = [i for i, value in enumerate(run.inputs) if self._buffers.home_group(value) in in_arena]
        written = [i for i, value in enumerate(run.outputs) if self._buffers.home_group(value) in in_arena]
        if not read and not written:
            return kernel

        def call(inputs: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
            shown = [inputs[i] for i in read]
            results = kernel(inputs, destinations)
            clone_views(results, destinations, [*shown, *(results[i] for i in written)])
            return results

        return call

    def _count_taken(self, shard: int) -> Action:
        """Returns an action that counts a taken weights group, and grants its shard credit for several at once."""
        taken, grant = self._taken, self._routes.granting(shard, self._program.hub, self._buffers.nothing)
        taken.setdefault(shard, 0)

        def count(step: int) -> None:
            taken[shard] = number = taken[shard] + 1
            if number % WEIGHTS_CREDIT_BATCH == 0:
                grant(number)

        return count

    def _acknowledge_batch(self, step: int) -> None:
        """Lets the worker use the slot of the step's batch again: at the end of the step the wafer has read it."""
        self._workers[worker_of_step(step, len(self._workers))].ack(step)
