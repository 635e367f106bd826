"""The step program of a wafer in layer pipelined mode, in which one wafer runs the whole step.

The states lie on the wafer, in the same memory and with the same kernels as on a MemoryX shard. Regions run side by
side in a few threads; with one thread they take turns, in an order without waits. The first thread, that of the steps,
uses the links: it receives the batch for all regions, and sends outputs when all regions have ended the step. No region
begins a step before all have ended the one before.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from wafer.joins import JOINS, JoinBuffer
from wafer.kernels import WaferKernels
from wafer.large_tensors import limit_large_tensors, release_large_tensors
from wafer.regions import InstructionIndex, Positions, RegionKernels, RegionOrder, RegionThreads
from waferbox.links.elements import torch_dtype
from waferbox.links.hub import Hub, Stopped
from waferbox.links.link import Link
from waferbox.runtime.groups import SendBuffers
from waferbox.runtime.node_job import LinkKey
from waferbox.runtime.program import Action, Entry, Program
from waferbox.runtime.progress import group_label
from waferbox.runtime.schedule import StepSchedule, worker_of_step
from waferbox.states.kernels import StateKernels
from waferbox.states.point_shares import PointShares, keep_due_states
from waferbox.states.store import Snapshots, StateStore
from wsc.v1 import node_pb2, plan_pb2


class PipelineProgram:
    """The step program of one epoch. Owns the buffers of sent and of joined values.

    Used by the thread of the steps, `interrupt` aside. Raises ValueError if the plan is inconsistent.
    """

    def __init__(
        self,
        plan: plan_pb2.PipelinePlan,
        kernels: WaferKernels,
        updates: StateKernels,
        store: StateStore,
        snapshots: Snapshots,
        recovery_points: PointShares,
        hub: Hub,
        links: Mapping[LinkKey, Link],
        *,
        num_threads: int,
    ) -> None:
        """num_threads: the most threads for regions."""
        self._store = store
        self._slots = {slot.value: slot.name for slot in plan.states}
        self._snapshots = snapshots
        self._recovery_points = recovery_points
        self._program = Program(hub, "compute")
        self.progress = self._program.progress
        self._coordinator = links[node_pb2.LINK_PURPOSE_COORDINATOR, 0]
        workers = sorted(index for purpose, index in links if purpose == node_pb2.LINK_PURPOSE_WORKER)
        self._workers = [links[node_pb2.LINK_PURPOSE_WORKER, index] for index in workers]
        self._groups = {group.id: group for group in plan.groups}
        for link in self._workers:
            link.expect({g.id: g.nbytes for g in plan.groups if g.kind == plan_pb2.GROUP_KIND_BATCH})
        self._coordinator.expect({})
        self._order = RegionOrder(plan, num_threads)
        self._positions = Positions(self._order.num_threads, max(map(len, self._order.threads)))
        self._states = {slot.value: store.tensor(slot.name) for slot in plan.states}
        self._set_values(plan)
        self._sent = [i.send.group for i in self._order.instructions.values() if i.HasField("send")]
        self._buffers = self._make_buffers()
        self._kernels = RegionKernels(
            plan, kernels, updates, self._states, store, self._place_joined(plan), self._buffers
        )
        limit_large_tensors(plan.own_bytes - store.memory.nbytes - self._buffers.nbytes)
        self._awaited = {need for needs in self._order.needs.values() for need in needs}
        self._indices = {place: index for places in self._order.threads for index, place in enumerate(places)}
        self._last_reads = self._find_last_reads()
        self._names = [region.name for region in plan.regions]
        self._num_micro_batches = plan.micro_batches
        self._add_first_thread()
        others = [self._entries_of(thread) for thread in range(1, self._order.num_threads)]
        self._threads = RegionThreads(others, self._positions, hub.stop)

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        recovery_points = self._recovery_points
        keep_states = partial(keep_due_states, recovery_points, self._snapshots, schedule, self.progress)
        self._coordinator.limit_ahead(schedule.run_ahead_steps)
        recovery_points.keep_first(self.progress)
        self._threads.start(schedule, self.progress)
        try:
            seconds = self._program.run(schedule, keep_states)
            recovery_points.keep_last(self.progress)
            return seconds
        except Stopped:
            if self._threads.error is not None:
                raise self._threads.error from None
            raise
        finally:
            self._threads.end()

    def interrupt(self) -> None:
        self._snapshots.interrupt()
        self._recovery_points.interrupt()
        self._positions.stop()

    def close(self) -> None:
        self._program.close()
        self._kernels.close()
        self._states.clear()
        self._buffers.close()
        release_large_tensors()

    # --- values -------------------------------------------------------------------------------------------------------

    def _set_values(self, plan: plan_pb2.PipelinePlan) -> None:
        """Sets the values that no instruction makes: states, and the numbers of micro-batches."""
        values = self._program.values
        for value, tensor in self._states.items():
            values.tensors[values.index(value)] = tensor
        for micro_batch, value in enumerate(plan.number_values):
            values.tensors[values.index(value)] = torch.tensor([micro_batch])

    def _make_buffers(self) -> SendBuffers:
        runs = [instruction.run for instruction in self._order.instructions.values() if instruction.HasField("run")]
        settled = dict(self._states)
        for run in runs:
            for output, state in zip(run.outputs, run.commits, strict=False):
                if state:
                    settled[output] = self._states[state]
        produced = {value for run in runs for value in run.outputs}
        return SendBuffers((self._groups[group] for group in self._sent), produced, settled=settled)

    def _place_joined(self, plan: plan_pb2.PipelinePlan) -> Mapping[int, JoinBuffer]:
        """Returns the buffers of the values that micro-batches join."""
        joined = {}
        for each in plan.joined:
            if each.reduction in JOINS:
                buffer = self._buffers.destination(each.value)
                if buffer is None:
                    buffer = torch.empty(tuple(each.type.shape), dtype=torch_dtype(each.type.element_type))
                joined[each.value] = (buffer, each.reduction)
        return joined

    def _find_last_reads(self) -> dict[int, dict[int, InstructionIndex]]:
        """Returns the last read of each reading thread, for each value that several regions read."""
        order = self._order
        dropped = {value for instruction in order.instructions.values() for value in instruction.run.drops}
        regions: dict[int, set[int]] = defaultdict(set)
        last: dict[int, dict[int, InstructionIndex]] = defaultdict(dict)
        made = {value for place in order.instructions for value in order.made_by(place)}
        for thread, places in enumerate(order.threads):
            for place in places:
                for value in order.read_by(place):
                    if value in made and value not in dropped:
                        regions[value].add(place.region)
                        last[value][thread] = place
        return {value: reads for value, reads in last.items() if len(regions[value]) > 1}

    # --- instructions -------------------------------------------------------------------------------------------------

    def _add_first_thread(self) -> None:
        """Adds the actions of the first thread: begin of the step, receives, regions, and end of the step."""
        program, positions, order = self._program, self._positions, self._order
        others = range(1, order.num_threads)
        if others:
            program.add(lambda step: positions.reach(0, positions.begun(step)), "step", what="send")
        received = [place for place in order.threads[0] if order.instructions[place].HasField("receive")]
        for place in received:
            program.add_receive(self._groups[order.instructions[place].receive.group], self._workers)
        if others and received:
            program.add(self._reach_action(0, len(received) - 1), "batch", what="send")
        for entry in self._entries_of(0, len(received)):
            program.add_entry(entry)
        for thread in others:
            program.add(self._wait_action(0, thread, None), "end of step", what="wait")
        for number in self._sent:
            self._add_send(self._groups[number])
        if received:
            program.add(self._acknowledge_batch, "batch taken", what="send")

    def _entries_of(self, thread: int, first: int = 0) -> list[Entry]:
        """Returns the entries of a thread in a step, from its instruction `first` on."""
        order = self._order
        entries: list[Entry] = []
        waited = [-1] * order.num_threads  # the index of the last awaited instruction of each thread
        for index, place in enumerate(order.threads[thread][first:], first):
            region = self._names[place.region]
            for need in sorted(order.needs[place]):
                other = order.thread_of(need)
                if other != thread and self._indices[need] > waited[other]:
                    waited[other] = self._indices[need]
                    entries.append(Entry(self._wait_action(thread, other, waited[other]), "wait", region))
            entry = self._entry(place)
            shared = [value for value in order.read_by(place) if self._last_reads.get(value, {}).get(thread) == place]
            more = [self._drop_action(value, thread) for value in dict.fromkeys(shared)]
            if order.num_threads > 1 and (more or place in self._awaited):
                more.insert(0, self._reach_action(thread, index))
            entries.append(entry._replace(action=_sequence([entry.action, *more]), region=region))
        return entries

    def _entry(self, place: InstructionIndex) -> Entry:
        """Returns the entry of an instruction of a region."""
        instruction, values = self._order.instructions[place], self._program.values
        match instruction.WhichOneof("kind"):
            case "run":
                run = instruction.run
                detail = run.layer or self._kernels.name(run)
                if self._num_micro_batches > 1 and run.layer:
                    detail = f"{detail}, micro-batch {run.micro_batch + 1}"
                return Entry(self._kernels.action(run, values), "compute", detail)
            case "send":
                group = self._groups[instruction.send.group]
                copies = [(values.index(value), tensor) for value, tensor in self._buffers.copies(group.id)]
                return Entry(self._copy_action(copies), "compute", group_label(group))
            case "commit":
                commit = instruction.commit
                action = self._commit_action(values.index(commit.value), commit.state)
                return Entry(action, "compute", self._slots[commit.state])
            case kind:
                raise ValueError(f"a region has no instruction {kind}")

    def _copy_action(self, copies: Sequence[tuple[int, torch.Tensor]]) -> Action:
        tensors = self._program.values.tensors

        def copy(step: int) -> None:
            for index, buffer in copies:
                buffer.copy_(tensors[index])

        return copy

    def _commit_action(self, index: int, state: int) -> Action:
        tensors, buffer, store, name = (
            self._program.values.tensors,
            self._states[state],
            self._store,
            self._slots[state],
        )

        def commit(step: int) -> None:
            if store.copies_on_write:
                store.before_write([name])
            buffer.copy_(tensors[index])

        return commit

    def _wait_action(self, own: int, thread: int, index: int | None) -> Action:
        """Returns an action of thread `own` that waits until another has done its instruction `index`; None: all."""
        positions, progress, now = self._positions, self.progress, time.perf_counter

        def wait(step: int) -> None:
            position = positions.ended(step) if index is None else positions.after(step, index)
            if positions.has_reached(thread, position):
                return
            begin = now()
            positions.wait(thread, position)
            if own == 0:  # The report is about the time of the first thread.
                progress.wait += now() - begin

        return wait

    def _reach_action(self, thread: int, index: int) -> Action:
        positions = self._positions
        return lambda step: positions.reach(thread, positions.after(step, index))

    def _drop_action(self, value: int, thread: int) -> Action:
        """Returns an action after a thread's last read of a value, which drops it if all other threads have read it."""
        positions, tensors = self._positions, self._program.values.tensors
        number = self._program.values.index(value)
        others = [(other, self._indices[place]) for other, place in self._last_reads[value].items() if other != thread]

        def drop(step: int) -> None:
            if all(positions.has_reached(other, positions.after(step, index)) for other, index in others):
                tensors[number] = None

        return drop

    def _add_send(self, group: plan_pb2.Group) -> None:
        """Adds an action that sends a group at the end of a step, when the regions have copied its members into it."""
        hub, link, progress, payload = (
            self._program.hub,
            self._coordinator,
            self.progress,
            self._buffers.slice(group.id),
        )
        number, now = group.id, time.perf_counter

        def send(step: int) -> None:
            begin = now()
            hub.send(link, number, step, payload, window="ack", as_bytes=True)
            progress.send += now() - begin

        self._program.add_entry(Entry(send, "send", group_label(group), only_outputs=True))

    def _acknowledge_batch(self, step: int) -> None:
        """Lets the worker use the slot of the step's batch again: at the end of the step the wafer has read it."""
        self._workers[worker_of_step(step, len(self._workers))].ack(step)


def _sequence(actions: Sequence[Action]) -> Action:
    if len(actions) == 1:
        return actions[0]

    def run(step: int) -> None:
        for action in actions:
            action(step)

    return run
