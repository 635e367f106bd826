"""The regions of layer pipelined mode: the order of their instructions, their threads and their kernels."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from wafer.joins import JoinBuffer, joining
from wafer.kernels import WaferKernel, WaferKernels
from waferbox.cirh.execution.kernel import OperationFailed, span
from waferbox.host.folders import cache_root
from waferbox.host.threads import GuardedThread
from waferbox.links.hub import Stopped
from waferbox.runtime.groups import SendBuffers
from waferbox.runtime.program import Action, Entry, Values, run_recorded
from waferbox.runtime.progress import Progress, short_list
from waferbox.runtime.schedule import StepSchedule, makes_and_reads
from waferbox.states.kernel_failures import KernelFailures
from waferbox.states.kernels import StateKernels
from waferbox.states.store import StateStore
from wsc.v1 import plan_pb2

# --- The order of the instructions ------------------------------------------------------------------------------------


class InstructionIndex(NamedTuple):
    """The position of an instruction in the plan."""

    region: int
    position: int


class RegionOrder:
    """The order in which each thread runs the instructions of its regions, fixed when the plan is loaded. Immutable.

    The threads' lists are parts of one order, in which each instruction follows those that make its inputs. Waits of
    one thread for another therefore form no circle. Raises ValueError if the plan has no such order.
    """

    def __init__(self, plan: plan_pb2.PipelinePlan, num_threads: int) -> None:
        """num_threads: the most threads to use."""
        self.instructions = {
            InstructionIndex(number, position): instruction
            for number, region in enumerate(plan.regions)
            for position, instruction in enumerate(region.instructions)
        }
        groups = {group.id: group for group in plan.groups}
        self._sides = {place: makes_and_reads(each, groups) for place, each in self.instructions.items()}
        self._thread_of_region = _divide([region.width * region.height for region in plan.regions], num_threads)
        self.needs = self._find_needs()
        self.threads = self._arrange(len(plan.regions))

    @property
    def num_threads(self) -> int:
        return len(self.threads)

    def thread_of(self, place: InstructionIndex) -> int:
        """Returns the number of the thread that runs an instruction."""
        # A link is used by one thread, so the first thread receives for all.
        received = self.instructions[place].WhichOneof("kind") == "receive"
        return 0 if received else self._thread_of_region[place.region]

    def made_by(self, place: InstructionIndex) -> Sequence[int]:
        """Returns the values that an instruction makes."""
        return self._sides[place][0]

    def read_by(self, place: InstructionIndex) -> Sequence[int]:
        """Returns the values that an instruction reads."""
        return self._sides[place][1]

    def _find_needs(self) -> dict[InstructionIndex, set[InstructionIndex]]:
        """Returns the instructions of other regions that each instruction comes after."""
        makers: dict[int, list[InstructionIndex]] = defaultdict(list)
        for place in self.instructions:
            for value in self.made_by(place):
                makers[value].append(place)
        needs: dict[InstructionIndex, set[InstructionIndex]] = {}
        for place in self.instructions:
            needed = {maker for value in self.read_by(place) for maker in makers[value]}
            for value in self.made_by(place):  # The parts of a joined value are made one after the other.
                needed.update(makers[value][: makers[value].index(place)])
            needs[place] = {each for each in needed if each.region != place.region}
        return needs

    def _arrange(self, num_regions: int) -> list[list[InstructionIndex]]:
        """Returns the instructions of each thread, in order.

        All threads advance at one pace. A thread advances the last of its regions that can run, so that micro-batches
        that have begun are ended first.
        """
        receives = [place for place, each in self.instructions.items() if each.HasField("receive")]
        done = set(receives)
        rest: list[deque[InstructionIndex]] = [deque() for _ in range(num_regions)]
        for place in sorted(self.instructions.keys() - done):
            rest[place.region].append(place)
        threads: list[list[InstructionIndex]] = [[] for _ in range(max(self._thread_of_region, default=0) + 1)]
        threads[0] += receives
        while any(rest):
            chosen: dict[int, InstructionIndex] = {}
            for region in reversed(range(num_regions)):
                thread = self._thread_of_region[region]
                if thread not in chosen and rest[region] and self.needs[rest[region][0]] <= done:
                    chosen[thread] = rest[region].popleft()
            if not chosen:
                raise ValueError(f"the regions wait for one another: {[each[0] for each in rest if each]}")
            for thread, place in chosen.items():
                threads[thread].append(place)
            done.update(chosen.values())
        return threads


def _divide(areas: Sequence[int], num_threads: int) -> list[int]:
    """Returns the thread of each region. A thread gets neighbours, with about as much area as each other thread."""
    total, before = sum(areas) or 1, 0
    numbers = []
    for area in areas:
        numbers.append(min(num_threads - 1, int((before + area / 2) * num_threads / total)))
        before += area
    known = {number: index for index, number in enumerate(sorted(set(numbers)))}
    return [known[number] for number in numbers]


# --- The threads ------------------------------------------------------------------------------------------------------


class Positions:
    """The position of each thread: a number that grows with each instruction and step. Thread-safe.

    A thread writes its own number and reads the others' without a lock; only a wait takes one. No wake-up is lost: a
    waiting thread counts itself as sleeping before its last look at the number, and an advancing thread writes its
    number before it looks for sleepers. The interpreter keeps these orders.
    """

    def __init__(self, num_threads: int, most_instructions: int) -> None:
        """most_instructions: the most instructions of a thread in a step."""
        self._per_step = most_instructions + 2
        self._done = [0] * num_threads
        self._changed = threading.Condition()
        self._num_sleeping = 0
        self._stopped = False

    def begun(self, step: int) -> int:
        """Returns the position of a thread that has begun a step."""
        return step * self._per_step

    def after(self, step: int, index: int) -> int:
        """Returns the position of a thread after its instruction `index`, from 0, of a step."""
        return step * self._per_step + index + 1

    def ended(self, step: int) -> int:
        """Returns the position of a thread that has ended a step."""
        return (step + 1) * self._per_step - 1

    def reach(self, thread: int, position: int) -> None:
        """Sets the position of a thread, which alone may call this."""
        self._done[thread] = position
        if self._num_sleeping:
            with self._changed:
                self._changed.notify_all()

    def has_reached(self, thread: int, position: int) -> bool:
        return self._done[thread] >= position

    def wait(self, thread: int, position: int) -> None:
        """Waits until a thread has reached a position. Raises Stopped."""
        done = self._done
        if done[thread] >= position:
            return
        with self._changed:
            self._num_sleeping += 1
            try:
                while done[thread] < position:
                    if self._stopped:
                        raise Stopped
                    self._changed.wait()
            finally:
                self._num_sleeping -= 1

    def stop(self) -> None:
        """Makes every wait raise Stopped. From any thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class RegionThreads:
    """The threads of regions, except the first: that is the thread of the steps, which begins and ends each step.

    Used by the thread of the steps. The first exception of a thread is `error`.
    """

    def __init__(
        self, entries: Sequence[Sequence[Entry]], positions: Positions, on_failure: Callable[[], None]
    ) -> None:
        """
        Args:
            entries: the actions of each thread in a step, in order.
            positions: the positions of all threads.
            on_failure: ends the waits of the first thread.
        """
        self._positions = positions
        self._on_failure = on_failure
        self._threads = [
            GuardedThread(self._runner(number, list(own)), name=f"regions-{number}", on_defect=self._failed)
            for number, own in enumerate(entries, 1)
        ]
        self._schedule: StepSchedule | None = None
        self._progress: Progress | None = None
        self.error: Exception | None = None

    def start(self, schedule: StepSchedule, progress: Progress) -> None:
        self._schedule, self._progress = schedule, progress
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stops the threads, and joins them."""
        self._positions.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _runner(self, number: int, entries: Sequence[Entry]) -> Callable[[], None]:
        actions = [entry.action for entry in entries]

        def run() -> None:
            schedule, progress, positions = self._schedule, self._progress, self._positions
            assert schedule is not None
            assert progress is not None
            try:
                with torch.inference_mode():
                    for step in range(1, schedule.num_steps + 1):
                        positions.wait(0, positions.begun(step))
                        recorder = progress.recorder
                        if recorder is None:
                            for action in actions:
                                action(step)
                        else:
                            run_recorded(entries, recorder, schedule, step)
                        positions.reach(number, positions.ended(step))
            except Stopped:
                return

        return run

    def _failed(self, error: Exception) -> None:
        self.error = self.error or error
        self._positions.stop()
        self._on_failure()


# --- The kernels ------------------------------------------------------------------------------------------------------


class RegionKernels:
    """The kernels of one epoch, and their bindings to the runs of the regions. Used by one thread at a time.

    A kernel that updates states is one of a MemoryX shard, which writes in place. All others are those of a wafer in
    weight streaming.
    """

    def __init__(
        self,
        plan: plan_pb2.PipelinePlan,
        kernels: WaferKernels,
        updates: StateKernels,
        states: Mapping[int, torch.Tensor],
        store: StateStore,
        joined: Mapping[int, JoinBuffer],
        buffers: SendBuffers,
    ) -> None:
        """
        Args:
            plan: the plan.
            kernels: makes the kernels that update no state.
            updates: makes the kernels that update states.
            states: the tensors of the states, by value.
            store: the store of the states.
            joined: the buffers of values that micro-batches join.
            buffers: the buffers of sent values.
        """
        runs = [i.run for region in plan.regions for i in region.instructions if i.HasField("run")]
        updating = {run.kernel for run in runs if any(run.commits)}
        others = {run.kernel for run in runs if run.outputs and not any(run.commits)}
        texts = {kernel.id: kernel.cirh for kernel in plan.kernels if kernel.id in updating}
        self._updates = updates.make(texts, store.memory, cache_root() / "kernels")
        self._wafer_kernels = kernels
        self._kernels = kernels.make((k for k in plan.kernels if k.id in others), plan.kernel_library)
        self._names = {slot.value: slot.name.removeprefix("state.") for slot in plan.states}
        self._slots = {slot.value: slot.name for slot in plan.states}
        self._states = dict(states)
        self._store = store
        self._begin, self._end = span(store.memory.tensor(torch.uint8, (store.memory.nbytes,), 0))
        self._joined = dict(joined)
        self._buffers = buffers
        self._failures = KernelFailures(plan.sources)
        self._made: set[int] = set()  # the outputs of the runs bound so far

    def close(self) -> None:
        """Drops all tensors."""
        self._wafer_kernels.release()
        self._updates.clear()
        self._states.clear()
        self._joined.clear()

    def name(self, run: plan_pb2.Run) -> str:
        """Returns the name of a run without a layer on a timeline."""
        states = [self._names[state] for state in run.commits if state]
        return short_list(states) if states else f"kernel {run.kernel}"

    def action(self, run: plan_pb2.Run, values: Values) -> Action:
        """Returns an action that calls a run's kernel, sets its outputs, and drops the values that it names.

        Called once for each run, in their order for runs that make the same value: the first makes the value, and the
        later ones join their parts to it.
        """
        tensors, failures = values.tensors, self._failures
        inputs, outputs, drops = values.indices(run.inputs), values.indices(run.outputs), values.indices(run.drops)
        destinations = [None if value in self._made else self._destination(value) for value in run.outputs]
        if not run.outputs:  # The run only waits for its inputs.

            def call(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                return ()

        elif any(run.commits):
            states = [self._states[state] if state else None for state in run.commits]
            passing = [i for i, value in enumerate(run.inputs) if self._passes(value)]
            update = self._updates[run.kernel].bind(states, destinations, passing)
            store, committed = self._store, [self._slots[state] for state in run.commits if state]

            def call(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                if store.copies_on_write:
                    store.before_write(committed)
                return update(given)

        else:
            kernel = self._kernels[run.kernel]
            if not self._made.isdisjoint(run.outputs):
                kernel = joining(kernel, self._joined_results(run))
            if not self._states.keys().isdisjoint(run.inputs):
                kernel = self._beside_states(kernel)

            def call(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                return kernel(given, destinations)

        self._made.update(run.outputs)

        def run_kernel(step: int) -> None:
            try:
                results = call([tensors[index] for index in inputs])
            except OperationFailed as error:
                raise failures.failure(run, step, error) from error
            for index, result in zip(outputs, results, strict=True):
                tensors[index] = result
            for index in drops:
                tensors[index] = None

        return run_kernel

    def _destination(self, value: int) -> torch.Tensor | None:
        return self._joined[value][0] if value in self._joined else self._buffers.destination(value)

    def _passes(self, value: int) -> bool:
        """Whether a value lies at another address in each step."""
        return value not in self._states and self._destination(value) is None

    def _joined_results(self, run: plan_pb2.Run) -> dict[int, JoinBuffer]:
        """Returns the buffers of results that are joined to earlier ones. Raises ValueError if the plan has no join."""
        again = {index: value for index, value in enumerate(run.outputs) if value in self._made}
        if unknown := set(again.values()) - self._joined.keys():
            raise ValueError(f"several Runs make the values {sorted(unknown)}, which are not joined")
        return {index: self._joined[value] for index, value in again.items()}

    def _beside_states(self, kernel: WaferKernel) -> WaferKernel:
        """Returns the kernel with results that are no views of states, as an update would change them."""
        begin, end = self._begin, self._end

        def call(inputs: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
            results = kernel(inputs, destinations)
            for index, result in enumerate(results):
                if begin <= result.data_ptr() < end:
                    results[index] = result.clone()
            return results

        return call
