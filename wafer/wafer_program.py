"""The wafer's part of a plan, as a list of calls: receive a batch and weights, run kernels, send what is to be reduced.

Nothing stays from one step to the next. Kernels write what is sent directly into the memory that SwarmX reads. Large
gradients take turns in an arena: before a kernel writes there, the program waits for the count of released groups that
the plan names. Where the arena has room for all of a step, and in all other buffers, a group may be written again in
the next step because the plan has the wafer receive something from every shard that gets the group before, and a shard
sends that only when it has read the group. Groups that go to the coordinator alone travel as bytes.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from wafer.joins import adding, beside_inputs, joining
from wafer.kernels import WaferKernel, WaferKernels
from wafer.large_tensors import limit_large_tensors, release_large_tensors
from waferbox.cirh.execution.kernel import clone_views
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.runtime.arena import RELEASED_GROUP, ArenaCounts, direct_values
from waferbox.runtime.groups import SendBuffers
from waferbox.runtime.node_job import LinkKey
from waferbox.runtime.program import Action, Program
from waferbox.runtime.schedule import (
    CREDIT_GROUPS,
    WEIGHTS_CREDIT_BATCH,
    StepSchedule,
    is_for_coordinator_only,
    is_received_by_wafers,
    worker_of_step,
)
from wsc.v1 import node_pb2, plan_pb2


class WaferProgram:
    """One execution's program; owns the buffers that are sent.

    number: of this wafer, among all.
    """

    def __init__(
        self, plan: plan_pb2.WaferPlan, number: int, kernels: WaferKernels, hub: Hub, links: Mapping[LinkKey, Link]
    ) -> None:
        self._program = Program(hub, "compute")
        self.progress = self._program.progress
        values = self._program.values
        for micro_batch, value in enumerate(plan.number_values):
            values.tensors[values.index(value)] = torch.tensor([number * plan.micro_batches + micro_batch])
        self._parent = links[node_pb2.LINK_PURPOSE_PARENT, 0]
        workers = sorted(index for purpose, index in links if purpose == node_pb2.LINK_PURPOSE_WORKER)
        self._workers = [links[node_pb2.LINK_PURPOSE_WORKER, index] for index in workers]
        self._taken: dict[int, int] = {}  # weights groups, by shard
        groups = {group.id: group for group in plan.groups}
        self._expect(plan.groups)
        self._kernels = kernels
        made = kernels.make(plan.kernels, plan.kernel_library)
        kinds = [instruction.WhichOneof("kind") for instruction in plan.instructions]
        sent = [i.send.group for i, kind in zip(plan.instructions, kinds, strict=True) if kind == "send"]
        produced = {value for i in plan.instructions for value in i.run.outputs}
        self._reductions = {
            member.value: group.reduction
            for group in plan.groups
            if group.kind == plan_pb2.GROUP_KIND_REDUCTION
            for member in group.members
        }
        self._sums = {joined.value for joined in plan.joined}  # that are not sent from where they lie
        self._made: set[int] = set()  # values that a Run makes that was added
        self._divided = plan.micro_batches > 1
        self._counts = ArenaCounts(plan.arena)
        self._released = 0  # the last count that was waited for
        self._buffers = SendBuffers(
            (groups[group] for group in sent),
            produced,
            arena=plan.arena,
            direct=direct_values(plan) if self._counts.credited else produced,
        )
        limit_large_tensors(plan.own_bytes - self._buffers.nbytes)
        for instruction, kind in zip(plan.instructions, kinds, strict=True):
            match kind:
                case "receive":
                    self._add_receive(groups[instruction.receive.group])
                case "run":
                    self._add_run(instruction.run, made[instruction.run.kernel])
                case "send":
                    group = groups[instruction.send.group]
                    self._add_waits([group.id])
                    as_bytes = is_for_coordinator_only(group)
                    self._program.add_send(group, [self._parent], self._buffers, as_bytes=as_bytes)
                case _:
                    raise ValueError(f"a wafer has no instruction {kind}")
        if any(group.kind == plan_pb2.GROUP_KIND_BATCH for group in plan.groups):
            self._program.add(self._acknowledge_batch, "batch taken", what="send")

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        return self._program.run(schedule)

    def interrupt(self) -> None:
        """All waits are the hub's."""

    def close(self) -> None:
        self._program.close()
        self._kernels.release()
        self._buffers.close()
        release_large_tensors()

    def _expect(self, groups: Iterable[plan_pb2.Group]) -> None:
        batch = {group.id: group.nbytes for group in groups if group.kind == plan_pb2.GROUP_KIND_BATCH}
        for link in self._workers:
            link.expect(batch)
        sizes = {group.id: group.nbytes for group in groups if is_received_by_wafers(group)}
        self._parent.expect({**sizes, RELEASED_GROUP: 0})

    def _add_receive(self, group: plan_pb2.Group) -> None:
        if group.kind == plan_pb2.GROUP_KIND_BATCH:
            self._program.add_receive(group, self._workers)
            return
        self._program.add_receive(group, [self._parent])
        if group.kind == plan_pb2.GROUP_KIND_WEIGHTS:
            self._program.add(
                self._count_taken(group.source_shard), f"credit memoryx-{group.source_shard}", what="send"
            )

    def _add_run(self, run: plan_pb2.Run, kernel: WaferKernel) -> None:
        self._add_waits(group for value in run.outputs if (group := self._buffers.home_group(value)) is not None)
        kernel = self._beside_arena(run, kernel)
        values = self._program.values
        tensors = values.tensors
        inputs, outputs, drops = values.indices(run.inputs), values.indices(run.outputs), values.indices(run.drops)
        places = [None if value in self._made else self._buffers.output_tensor(value) for value in run.outputs]
        sums = {index: slot for index, slot in enumerate(outputs) if run.outputs[index] in self._sums}
        if not self._made.isdisjoint(run.outputs):
            kernel = self._joining(run, kernel)
            kernel = adding(kernel, sums, tensors) if sums else kernel
        elif sums:
            kernel = beside_inputs(kernel, sums)
        self._made.update(run.outputs)

        def run_kernel(step: int) -> None:
            results = kernel([tensors[index] for index in inputs], places)
            for index, result in zip(outputs, results, strict=True):
                tensors[index] = result
            for index in drops:
                tensors[index] = None

        what = run.layer or f"kernel {run.kernel}"
        self._program.add(run_kernel, f"{what}, micro-batch {run.micro_batch + 1}" if self._divided else what)

    def _joining(self, run: plan_pb2.Run, kernel: WaferKernel) -> WaferKernel:
        """The kernel of a later micro-batch: what is reduced is joined to what the ones before have made of it."""
        joined = {}
        for index, value in enumerate(run.outputs):
            if value in self._made and value not in self._sums:
                place = self._buffers.output_tensor(value)
                assert place is not None, "what is reduced is sent"
                joined[index] = (place, self._reductions[value])
        return joining(kernel, joined)

    def _add_waits(self, groups: Iterable[int]) -> None:
        """Before groups are written: for the releases of those that lie in their places."""
        awaited = {count for group in groups if (count := self._counts.awaited(group)) is not None}
        for count in sorted(awaited):
            self._program.add(self._wait_for_release(count), "gradients taken", what="send")

    def _wait_for_release(self, awaited: int) -> Action:
        hub, parent, counts, progress = self._program.hub, self._parent, self._counts, self.progress
        now = time.perf_counter

        def wait(step: int) -> None:
            count = counts.count(awaited, step)
            if count > self._released:
                begin = now()
                hub.receive(parent, RELEASED_GROUP, count)
                self._released = count
                progress.send += now() - begin

        return wait

    def _beside_arena(self, run: plan_pb2.Run, kernel: WaferKernel) -> WaferKernel:
        """The kernel of this Run; nothing that it makes for later shows a place in the arena."""
        if not self._counts.credited:
            return kernel
        in_arena = self._counts.offsets.keys()
        read = [i for i, value in enumerate(run.inputs) if self._buffers.home_group(value) in in_arena]
        written = [i for i, value in enumerate(run.outputs) if self._buffers.home_group(value) in in_arena]
        if not read and not written:
            return kernel

        def call(inputs: Sequence[torch.Tensor], places: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
            results = kernel(inputs, places)
            clone_views(results, places, [*(inputs[i] for i in read), *(results[i] for i in written)])
            return results

        return call

    def _count_taken(self, shard: int) -> Action:
        """Grants credit for the weights groups of a shard that were taken, several at once: it may send more then."""
        hub, parent, taken = self._program.hub, self._parent, self._taken
        taken.setdefault(shard, 0)
        nothing = self._buffers.nothing

        def count(step: int) -> None:
            taken[shard] = number = taken[shard] + 1
            if number % WEIGHTS_CREDIT_BATCH == 0:
                hub.send(parent, CREDIT_GROUPS + shard, number, nothing)

        return count

    def _acknowledge_batch(self, step: int) -> None:
        """At the end of a step its batch is no longer read: the worker may use the slot again."""
        self._workers[worker_of_step(step, len(self._workers))].ack(step)
